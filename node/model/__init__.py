"""A transformers model run over a range of layers: structure, filling, forward, graphs."""
