"""Keys and values by our kernel: in the rows that torch writes, and in no other. Without a GPU the
kernel is interpreted on the CPU."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has no wheels for this platform")

from node.kernels.kv_rows import tried_writer
from node.kernels.triton.kv_rows import write_rows
from node.kv.layer_pool import KvShape, LayerPool

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = (KvShape(2, 32, 32), KvShape(8, 128, 128), KvShape(1, 576, 512), KvShape(3, 24, 40))
"""The second takes one program for a token, the third is a latent attention's."""


def written(shape: KvShape, key: Tensor, value: Tensor, slots: Tensor, *, ours: bool) -> LayerPool:
    by = write_rows if ours else None
    pool = LayerPool.empty(shape, 40, torch.float32, DEVICE, by)
    for part in pool.parts:
        part.fill_(-1)
    pool.write(slots, key, value)
    return pool


@pytest.mark.parametrize("layout", ["heads first", "tokens first", "part of wider rows", "turned"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_any_layout(shape: KvShape, layout: str) -> None:
    tokens = 7

    def drawn(width: int) -> Tensor:
        heads = shape.kv_heads
        return {
            "heads first": lambda: torch.randn(heads, tokens, width).transpose(0, 1),
            "tokens first": lambda: torch.randn(tokens, heads, width),
            "part of wider rows": lambda: torch.randn(tokens, heads, width + 8)[..., 3:-5],
            "turned": lambda: torch.randn(heads, width, tokens).permute(2, 0, 1),
        }[layout]().to(DEVICE)

    key, value = drawn(shape.key_width), drawn(shape.value_width)
    slots = torch.randperm(40)[:tokens].to(DEVICE)
    ours, theirs = (written(shape, key, value, slots, ours=each) for each in (True, False))
    assert torch.equal(ours.keys, theirs.keys)
    assert torch.equal(ours.values, theirs.values)


def test_a_writer_that_errs_is_not_used() -> None:
    shape = SHAPES[0]

    def shifted(keys: Tensor, values: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        write_rows(keys, values, slots - 1, key, value)

    def keys_alone(keys: Tensor, _: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        write_rows(keys, keys.clone(), slots, key, value)

    def fails(*_: Tensor) -> None:
        raise RuntimeError("no C compiler\nand much more")

    on = torch.float32, DEVICE
    assert tried_writer(write_rows, shape, *on) is write_rows
    for kernel in (shifted, keys_alone, fails, None):
        assert tried_writer(kernel, shape, *on) is None
    assert tried_writer(write_rows, KvShape(), *on) is None
