"""Event loop, parts, batches, profiles, traces, the report."""
