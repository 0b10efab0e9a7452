"""Runs work items over layers: scheduler, worker thread, model runner."""
