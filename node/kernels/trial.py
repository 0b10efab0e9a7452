"""Parameters of a kernel's trial on a device, and the error of a failed trial."""

SEED = 0
ERROR_MAX = 0.02
"""Maximum error, relative to the norm of attention's output for a row and head. Rounding to
bfloat16 causes 0.003; forgetting one token of 700 causes 0.04."""


class KernelRefused(Exception):
    """A kernel failed its trial; the message says how."""
