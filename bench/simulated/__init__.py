"""The transport adapter for tests and simulation: a network and a clock within one process."""
