"""Work items in, results out: scheduler, worker thread, model runner."""
