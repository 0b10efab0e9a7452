"""What a run without numbers shows of a layer, and what products are shared because of it."""

import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from node.model.inspection.layer_traits import LayerTraits, ran_without_numbers, traits_of
from node.model.layer_range import ModelLayout
from node.model.linear import packed_linear
from node.model.linear.merged_linear import MergedLinearPart, share_products
from node.model.linear.packed_linear import PackedLinear, favour_few_rows
from node.weights.store import WeightStore
from testing.tiny_families import make


class Branching(nn.Module):
    """Looks at a number to decide what to do."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + 1 if rows.sum() > 0 else rows


class Projections(nn.Module):
    """Several linear modules, of which some get the same tensor."""

    def __init__(self, *, change: bool = False, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(8, 4, bias=bias), nn.Linear(8, 6, bias=bias)
        self.apart, self.plain = nn.Linear(8, 4), nn.Linear(8, 4, bias=not bias)
        self.change = change

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows * 2
        first = self.a(rows)
        if self.change:
            rows.add_(1)
        second = self.b(rows)
        return torch.cat([first, second, self.apart(rows + 1), self.plain(rows)], dim=-1)


ROWS = torch.arange(24.0).view(1, 3, 8)


def test_a_layer_that_looks_at_numbers_is_not_recordable() -> None:
    assert not ran_without_numbers(Branching(), ROWS)
    assert traits_of(Branching(), ROWS) == LayerTraits()
    assert ran_without_numbers(Projections(), ROWS)


def test_linear_modules_with_one_input_are_siblings_unless_it_changes() -> None:
    assert traits_of(Projections(), ROWS).siblings == (("a", "b"),)
    assert traits_of(Projections(change=True), ROWS) == LayerTraits(recordable=True)


@pytest.mark.parametrize("bias", [True, False])
def test_a_shared_product_gives_each_its_own_and_keeps_nothing(bias: bool) -> None:
    plain, shared = Projections(bias=bias), Projections(bias=bias)
    share_products(shared, [("a", "b")])
    assert isinstance(shared.a, MergedLinearPart)
    assert isinstance(shared.b, MergedLinearPart)
    numbers = [sum(w.numel() for w in module.parameters()) for module in (plain, shared)]
    assert numbers[0] == numbers[1]
    with torch.inference_mode():
        for rows in (ROWS, ROWS[:, :1], -ROWS):
            torch.testing.assert_close(shared(rows), plain(rows))
            assert shared.a.__dict__["shared"]._given is None
        # In another order, twice, and by one alone: never from rows that came before.
        other = ROWS + 1
        torch.testing.assert_close(shared.b(ROWS), plain.b(ROWS))
        torch.testing.assert_close(shared.b(ROWS), plain.b(ROWS))
        torch.testing.assert_close(shared.a(other), plain.a(other))
        torch.testing.assert_close(shared.b(other), plain.b(other))


def test_a_shared_product_can_be_packed_and_is_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "NUMBERS_LEAST", 1)
    plain, shared = Projections(), Projections()
    share_products(shared, [("a", "b")])
    separate = weakref.ref(shared.get_parameter("a.product.linear.weight"))
    favour_few_rows(shared)
    assert isinstance(shared.a, MergedLinearPart)
    packed = shared.a.__dict__["shared"].linear
    assert isinstance(packed, PackedLinear)
    assert [module is packed for module in shared.modules()].count(True) == 1
    assert separate() is None
    with torch.inference_mode():
        torch.testing.assert_close(shared(ROWS), plain(ROWS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "recordable", "siblings"),
    [
        ("llama", True, 5),
        ("gpt2", True, 0),
        ("gpt_oss", False, 0),  # its router decides in Python who runs
        ("deepseek_v3", True, 4),  # the first layer is dense
    ],
)
def test_traits_of_real_layers(
    family: str, recordable: bool, siblings: int, tmp_path: Path
) -> None:
    make(tmp_path, family)
    traits = ModelLayout.of(WeightStore.open(str(tmp_path)), "float32").structure.traits
    assert traits[0].recordable is recordable
    assert sum(map(len, traits[0].siblings)) == siblings
