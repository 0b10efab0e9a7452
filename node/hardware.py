"""What this machine can lend, found out before anything heavy is started."""

from dataclasses import dataclass, replace

import psutil

from dht.errors import UserError
from dht.types import DeviceSpec

CPU_SHARE = 0.5
"""Part of the memory that is free which a CPU peer lends by default."""
GPU_SHARE = 0.85
"""Part of a GPU's free memory that is lent by default; the rest is for activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The device to compute on and the memory to lend."""

    device: DeviceSpec
    torch_device: str
    """``cpu`` or ``cuda:N``."""
    free_bytes: int
    lend_bytes: int
    driver_name: str = ""
    """What NVIDIA's driver calls the GPU; empty for others."""


def machine_of(gpu: int | None, memory_gib: float | None) -> Machine:
    """Look at the CPU, or at GPU number ``gpu``.

    Raises UserError for a GPU that does not exist or has no working driver, and for more memory
    than is free.
    """
    machine = _cpu() if gpu is None else _gpu(gpu)
    share = CPU_SHARE if gpu is None else GPU_SHARE
    lend_bytes = int(machine.free_bytes * share)
    if memory_gib is not None:
        lend_bytes = int(memory_gib * (1 << 30))
        if lend_bytes <= 0:
            raise UserError(f"--memory is {memory_gib} GiB; give a positive number")
        if lend_bytes > machine.free_bytes:
            raise UserError(
                f"--memory asks for {memory_gib} GiB, but {machine.device.name} has"
                f" {machine.free_bytes / (1 << 30):.1f} GiB free"
            )
    return replace(machine, lend_bytes=lend_bytes)


def at_most(machine: Machine, max_vram_gib: float | None) -> Machine:
    """``machine`` lending no more than so much of its GPU's memory; raises UserError."""
    if max_vram_gib is None:
        return machine
    if machine.device.kind == "cpu":
        raise UserError("--max-vram is for a GPU; on the CPU, --memory says how much is lent")
    if not 0 < max_vram_gib < 1e6:
        raise UserError(f"--max-vram is {max_vram_gib} GiB; give a positive number")
    return replace(machine, lend_bytes=min(machine.lend_bytes, int(max_vram_gib * (1 << 30))))


def _cpu() -> Machine:
    memory = psutil.virtual_memory()
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    device = DeviceSpec(kind="cpu", name=f"CPU with {cores} cores", memory_bytes=memory.total)
    return Machine(device=device, torch_device="cpu", free_bytes=memory.available, lend_bytes=0)


def _gpu(index: int) -> Machine:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not 0 <= index < count:
        found = {0: "no CUDA GPU was found", 1: "only GPU 0 was found"}.get(
            count, f"GPUs 0 to {count - 1} were found"
        )
        raise UserError(
            f"there is no GPU {index}: {found}. Check the driver with nvidia-smi, or lend the"
            " CPU with --cpu"
        )
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    name = torch.cuda.get_device_name(index)
    device = DeviceSpec(kind="cuda", name=name[:128], memory_bytes=total_bytes)
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return Machine(
        device=device,
        torch_device=f"cuda:{index}",
        free_bytes=free_bytes,
        lend_bytes=0,
        driver_name="" if uuid is None or torch.version.hip else f"GPU-{uuid}",
    )
