"""Kernels in Triton. Modules here import ``triton``, which a machine without a GPU may lack."""
