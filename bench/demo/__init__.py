"""The demo of `make demo`, and pictures of the pages."""
