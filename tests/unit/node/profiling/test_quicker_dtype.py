"""The default dtype: float32 for plain weights on a CPU, the quicker one for few bits."""

from dataclasses import replace
from itertools import count

import pytest
import torch

from dht.errors import UserError
from node.device.hardware import Machine, machine_of
from node.profiling import quicker_dtype
from node.profiling.quicker_dtype import TRIED, default_dtype
from node.weights.store import WeightStore
from testing.packed_checkpoints import FORMATS, write
from testing.tiny_families import make


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WeightStore]:
    """A plain checkpoint and a packed one."""
    directory = tmp_path_factory.mktemp("models")
    shape = {"hidden_size": 64, "intermediate_size": 64}
    make(directory / "plain", "llama", dtype=torch.bfloat16, **shape)
    write(directory / "plain", FORMATS["gptq"], directory / "packed")
    return {name: WeightStore.open(str(directory / name)) for name in ("plain", "packed")}


@pytest.fixture
def machine() -> Machine:
    return replace(machine_of(None, None), lend_bytes=1 << 28)


def test_plain_weights_are_computed_in_float32(
    stores: dict[str, WeightStore], machine: Machine
) -> None:
    found = default_dtype(stores["plain"], machine, None)
    assert (found.dtype, found.seconds, found.reason) == ("float32", {}, "")


def test_a_gpus_own_dtype_stays(stores: dict[str, WeightStore], machine: Machine) -> None:
    gpu = replace(machine, device=replace(machine.device, kind="cuda"), dtype="float16")
    assert default_dtype(stores["packed"], gpu, None).dtype == "float16"


@pytest.mark.parametrize(("kind", "quantize"), [("packed", None), ("plain", "int4")])
@pytest.mark.parametrize(("slow", "chosen"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_few_bits_are_computed_in_the_quicker_dtype(
    stores: dict[str, WeightStore],
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    quantize: str | None,
    slow: str,
    chosen: str,
) -> None:
    built: list[str] = []
    engine = quicker_dtype.Engine

    def seen(config: quicker_dtype.EngineConfig) -> quicker_dtype.Engine:
        built.append(config.dtype)
        assert config.quantize == quantize
        return engine(config)

    monkeypatch.setattr(quicker_dtype, "Engine", seen)
    ticks = count()
    found = default_dtype(
        stores[kind],
        machine,
        None,
        quantize,
        lambda: next(ticks) ** 2.0 if built[-1] == slow else next(ticks) * 1e-3,
    )
    assert (found.dtype, tuple(found.seconds)) == (chosen, TRIED)
    assert f"Computing in {chosen}" in found.reason
    assert "--dtype" in found.reason


def test_what_fits_in_no_dtype_is_refused(stores: dict[str, WeightStore], machine: Machine) -> None:
    with pytest.raises(UserError, match="cannot hold one layer"):
        default_dtype(stores["packed"], replace(machine, lend_bytes=1), None)
