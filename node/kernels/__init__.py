"""Kernels of our own (Triton, fused norms, experts), and when a device may use them."""
