"""The transport adapter over py-libp2p alone."""
