"""Finds what this machine can lend, before anything heavy is started."""

import sys
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dht.errors import UserError
from dht.messages.types import DeviceSpec
from node.device.limits import cores, cpu_quota, memory_limit

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingConfig:
    """Share of the memory that is lent."""

    cpu_share: float = 0.5
    """Share of the free memory that a CPU peer lends by default."""
    gpu_share: float = 0.85
    """Share of a GPU's free memory that is lent by default; the rest is for activations."""
    gpu_share_max: float = 0.95
    """Maximum share of a GPU's free memory that may be lent; with less left over, steps would
    fail."""


LENDING = LendingConfig()

PROBE = 64
"""Rows and columns of a test product that shows whether a GPU multiplies at all."""
BFLOAT16_SINCE = 8
"""Fixed by NVIDIA: major compute capability from which GPUs multiply bfloat16 in hardware."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The device to compute on and the memory to lend."""

    device: DeviceSpec
    torch_device: str
    """``cpu`` or ``cuda:N``."""
    free_bytes: int
    lend_bytes: int
    driver_name: str = ""
    """NVIDIA's driver's name of the GPU; empty for other devices."""
    dtype: str = "float32"
    """Dtype in which layers are computed by default."""
    hint: str = ""
    """Hint for the owner about that dtype on this device."""
    limited_by: str = ""
    """What leaves this process less free memory than the machine has; empty: nothing."""


def machine_of(gpu: int | None, memory_gib: float | None, *, or_less: bool = False) -> Machine:
    """Find what the CPU, or GPU number ``gpu``, can lend.

    Raises UserError if the GPU does not exist or has no working driver, or if ``memory_gib`` is
    more than can be lent, unless as much as can be is meant (``or_less``).
    """
    machine = _cpu() if gpu is None else _gpu(gpu)
    share, share_max = (
        (LENDING.cpu_share, 1.0) if gpu is None else (LENDING.gpu_share, LENDING.gpu_share_max)
    )
    lend_bytes = int(machine.free_bytes * share)
    if memory_gib is not None:
        lend_bytes = int(memory_gib * (1 << 30))
        if or_less:
            lend_bytes = min(lend_bytes, int(machine.free_bytes * share_max))
        if lend_bytes > machine.free_bytes * share_max:
            raise UserError(
                f"--memory asks for {memory_gib} GiB, but {machine.device.name} has"
                f" {machine.free_bytes / (1 << 30):.1f} GiB free"
                + (f" by {machine.limited_by}" if machine.limited_by else "")
                + (f", of which {share_max:.0%} can be lent" if share_max < 1 else "")
            )
    return replace(machine, lend_bytes=lend_bytes)


def at_most(machine: Machine, max_vram_gib: float | None) -> Machine:
    """``machine`` lending at most ``max_vram_gib`` of its GPU's memory."""
    if max_vram_gib is None:
        return machine
    return replace(machine, lend_bytes=min(machine.lend_bytes, int(max_vram_gib * (1 << 30))))


def gpu_count() -> int:
    """Number of GPUs that torch finds here."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is wrong with a driver, machine_of tells
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _cpu() -> Machine:
    memory = memory_limit()
    count = min(cores(), cpu_quota() or cores())
    name = f"CPU with {count} core{'s' * (count > 1)}"
    device = DeviceSpec(kind="cpu", name=name, memory_bytes=memory.total_bytes)
    return Machine(
        device=device,
        torch_device="cpu",
        free_bytes=memory.free_bytes,
        lend_bytes=0,
        limited_by=memory.by,
    )


def _gpu(index: int) -> Machine:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        if sys.platform == "darwin":
            raise UserError("GPUs of Macs are not used here: lend the CPU with --cpu")
        raise UserError(
            f"GPU {index} cannot be used: torch {torch.__version__} here was built for CPUs alone."
            " Install a build for CUDA into this environment (https://pytorch.org/get-started says"
            " how), or lend the CPU with --cpu"
        )
    with warnings.catch_warnings(record=True) as warned:  # torch warns if drivers are too old
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not 0 <= index < count:
        found = {0: "no CUDA GPU was found", 1: "only GPU 0 was found"}.get(
            count, f"GPUs 0 to {count - 1} were found"
        )
        told = "".join(f" ({_line(each.message)})" for each in warned[:1])
        raise UserError(
            f"there is no GPU {index}: {found}{told}. Check the driver with nvidia-smi, or lend the"
            " CPU with --cpu"
        )
    name = torch.cuda.get_device_name(index)
    major, minor = torch.cuda.get_device_capability(index)
    try:
        dtype = _dtype_of(torch.device("cuda", index))
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        built_for = ", ".join(torch.cuda.get_arch_list())
        raise UserError(
            f"GPU {index} ({name}, compute capability {major}.{minor}) does not compute with torch"
            f" {torch.__version__}, which was built for {built_for}: {_line(error)}"
        ) from None
    device = DeviceSpec(kind="cuda", name=name[:128], memory_bytes=total_bytes)
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    emulated = not torch.version.hip and major < BFLOAT16_SINCE and dtype == "bfloat16"
    return Machine(
        device=device,
        torch_device=f"cuda:{index}",
        free_bytes=free_bytes,
        lend_bytes=0,
        driver_name="" if uuid is None or torch.version.hip else f"GPU-{uuid}",
        dtype=dtype,
        hint="This GPU has no bfloat16 of its own: where the model's numbers allow it, --dtype"
        " float16 is faster"
        if emulated
        else "",
    )


def _dtype_of(device: "torch.device") -> str:
    """``bfloat16``, or ``float16`` if the GPU is too old to multiply in bfloat16.

    Raises RuntimeError if it multiplies in neither.
    """
    import torch

    for name in ("bfloat16", "float16"):
        try:
            square = torch.ones(PROBE, PROBE, dtype=getattr(torch, name), device=device)
            (square @ square).sum().item()
        except RuntimeError as error:
            failed = error
        else:
            return name
    raise failed


def _line(error: object) -> str:
    return " ".join(str(error).split())[:300]
