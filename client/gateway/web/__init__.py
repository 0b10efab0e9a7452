"""The gateway's HTTP side: paths, bounds, streams, its document, its log."""
