"""A dozen and more real peers on one machine."""
