"""The bundled story model: its text generator, its training script and its weights."""
