"""Our own kernels (Triton attention, fused norms, experts), and which devices may use them."""
