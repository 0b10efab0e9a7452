"""Runs rows through layers: eagerly, as TorchScript, or as CUDA graphs."""
