"""What a person is told of a GPU that cannot be used, and what is computed in on one that can."""

import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dht.errors import UserError
from node.device.hardware import LENDING, machine_of

FREE = 10 << 30
ONES = torch.ones


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes torch believe in GPUs of a compute capability, which multiply in some dtypes."""

    def believe(
        count: int = 2,
        capability: tuple[int, int] = (8, 6),
        refuses: dict[torch.dtype, str] | None = None,
    ) -> None:

        def made(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            assert device == torch.device("cuda", 1)
            if reason := (refuses or {}).get(dtype):
                raise RuntimeError(reason)
            return ONES(*shape, dtype=dtype)

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch, "ones", made)
        for name, value in {
            "is_available": count > 0,
            "device_count": count,
            "mem_get_info": (FREE, 12 << 30),
            "get_device_name": "GeForce",
            "get_device_capability": capability,
            "get_device_properties": SimpleNamespace(uuid="abc"),
            "get_arch_list": ["sm_75", "sm_86"],
        }.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)

    return believe


def test_a_gpu_lends_a_share_of_what_is_free(gpus: Callable[..., None]) -> None:
    gpus()
    machine = machine_of(1, None)
    assert machine.torch_device == "cuda:1"
    assert machine.lend_bytes == int(FREE * LENDING.gpu_share)
    assert (machine.dtype, machine.hint, machine.driver_name) == ("bfloat16", "", "GPU-abc")
    assert machine_of(1, 9.5).lend_bytes == int(9.5 * (1 << 30))
    with pytest.raises(UserError, match=r"has 10.0 GiB free, of which 95% can be lent"):
        machine_of(1, 9.8)  # steps need some themselves


def test_old_gpus_compute_in_what_they_can(gpus: Callable[..., None]) -> None:
    gpus(capability=(7, 5))
    machine = machine_of(1, None)
    assert machine.dtype == "bfloat16"  # slow, never wrong
    assert "--dtype float16 is faster" in machine.hint
    gpus(capability=(6, 1), refuses={torch.bfloat16: "CUBLAS_STATUS_NOT_SUPPORTED"})
    machine = machine_of(1, None)
    assert (machine.dtype, machine.hint) == ("float16", "")


def test_a_gpu_that_torch_has_no_kernels_for_is_named(gpus: Callable[..., None]) -> None:
    none = "CUDA error: no kernel image is available for execution on the device\nmore"
    gpus(capability=(6, 1), refuses={torch.bfloat16: none, torch.float16: none})
    with pytest.raises(UserError, match=r"6\.1.*built for sm_75, sm_86: .*no kernel image") as told:
        machine_of(1, None)
    assert "\n" not in str(told.value)


def test_a_build_for_cpus_is_not_taken_for_a_missing_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(UserError, match=r"GPU 0 cannot be used: torch .* was built for CPUs alone"):
        machine_of(0, None)
    monkeypatch.setattr(sys, "platform", "darwin")  # no build for CUDA is to be had there
    with pytest.raises(UserError, match=r"GPUs of Macs are not used here.*--cpu") as told:
        machine_of(0, None)
    assert "CUDA" not in str(told.value)


def test_what_torch_knows_of_the_driver_is_passed_on(
    gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(count=0)

    def unavailable() -> Any:
        warnings.warn("The NVIDIA driver on your system is too old\n(found 11040)", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", unavailable)
    with pytest.raises(UserError, match=r"no CUDA GPU was found \(The NVIDIA driver .* is too old"):
        machine_of(1, None)
    gpus(count=1)
    with pytest.raises(UserError, match="only GPU 0 was found"):
        machine_of(1, None)
