"""What a kernel's trial on a device draws and allows, and how it says no."""

SEED = 0
ERROR_MAX = 0.02
"""Of the norm of what attention gives a row in a head: rounding to bfloat16 is 0.003 of it, and one
token of 700 that is forgotten 0.04."""


class KernelRefused(Exception):
    """Says what the kernel did wrong."""
