"""What kernels ask of the device that they are launched on."""

import functools

import torch

SHARED_BYTES_KNOWN = 48 << 10
"""Fixed by CUDA: shared memory per block of threads that every device has."""


@functools.cache
def processors(device: torch.device) -> int:
    """Number of streaming multiprocessors of a device; 1 if it is not a GPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that a block of threads may use."""
    if device.type != "cuda":
        return SHARED_BYTES_KNOWN
    found = torch.cuda.get_device_properties(device)
    # AMD's devices may report 0.
    return max(SHARED_BYTES_KNOWN, getattr(found, "shared_memory_per_block_optin", 0))
