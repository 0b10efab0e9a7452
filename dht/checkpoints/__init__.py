"""A model's files, in a directory, on a hub or as GGUF: which they are, and how they are read."""
