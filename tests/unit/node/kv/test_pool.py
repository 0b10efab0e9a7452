"""Whatever sessions do in two pools, each reads back exactly what it wrote or brought along."""

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from node.kv.layer_pool import LayerPool
from node.kv.pool import KvPool
from tests.examples import examples

PAGES, PAGE_TOKENS, LAYERS = 10, 4, (2, 4)
names = st.sampled_from("abcde")
places = st.sampled_from((0, 1))


class Pools(RuleBasedStateMachine):
    """Sessions open, grow, go back, are cancelled, are exported and imported elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        rows = PAGES * PAGE_TOKENS
        self.tensors = [
            {
                layer: LayerPool(
                    keys=torch.full((rows, 1, 2), -1.0), values=torch.zeros(rows, 1, 1)
                )
                for layer in range(*LAYERS)
            }
            for _ in range(2)
        ]
        self.pools = [KvPool(each, PAGES, PAGE_TOKENS) for each in self.tensors]
        self.told: list[dict[str, tuple[int, list[float]]]] = [{}, {}]
        """By pool and session: tokens reserved, and the numbers written."""
        self.number = 0.0

    @rule(at=places, name=names, tokens=st.integers(1, PAGES * PAGE_TOKENS + 3))
    def open(self, at: int, name: str, tokens: int) -> None:
        if name in self.told[at]:
            return
        free = self.pools[at].free_tokens
        refused = self.pools[at].reserve(name, tokens)
        assert (refused is None) == (tokens <= free)
        if refused is None:
            self.told[at][name] = (tokens, [])
        else:
            assert str(free) in refused

    @rule(at=places, name=names, tokens=st.integers(1, 9))
    def append(self, at: int, name: str, tokens: int) -> None:
        if name not in self.told[at]:
            return
        reserved, numbers = self.told[at][name]
        tokens = min(tokens, reserved - len(numbers))
        reservation = self.pools[at].get(name)
        assert reservation is not None
        if tokens < 1:
            return
        assert self.pools[at].grow(name, reservation, len(numbers) + tokens)
        slots = self.pools[at].slots(reservation, len(numbers) + tokens)[len(numbers) :]
        fresh = [self.number + n for n in range(tokens)]
        self.number += tokens
        for pool in self.tensors[at].values():
            pool.write(slots, torch.tensor(fresh)[:, None, None].expand(-1, 1, 2),
                       -torch.tensor(fresh)[:, None, None])  # fmt: skip
        numbers += fresh
        reservation.written, reservation.layers = len(numbers), LAYERS

    @rule(at=places, name=names, share=st.floats(0, 1))
    def go_back(self, at: int, name: str, share: float) -> None:
        reservation = self.pools[at].get(name)
        if reservation is None:
            return
        reserved, numbers = self.told[at][name]
        position = int(share * len(numbers))
        assert self.pools[at].rewind(name, reservation, position) is None
        self.told[at][name] = (reserved, numbers[:position])

    @rule(at=places, name=names)
    def cancel(self, at: int, name: str) -> None:
        self.pools[at].free(name)
        self.told[at].pop(name, None)
        with pytest.raises(KeyError):
            self.pools[at].take(name, 0, 1)

    @precondition(lambda self: any(numbers for each in self.told for _, numbers in each.values()))
    @rule(at=places, name=names, most=st.integers(1, 30))
    def move(self, at: int, name: str, most: int) -> None:
        """The other pool takes what it lacks of the session, as far as it has room."""
        there = 1 - at
        if name not in self.told[at] or name not in self.told[there]:
            return
        (_, source), (room, target) = self.told[at][name], self.told[there][name]
        if len(source) <= len(target) or source[: len(target)] != target:
            return
        rows = self.pools[at].take(name, len(target), most)
        refused = self.pools[there].put(name, rows)
        if len(target) + rows.tokens > room:
            assert refused is not None
            assert str(room) in refused
            return
        assert refused is None
        target += source[len(target) :][: rows.tokens]

    @invariant()
    def each_reads_its_own(self) -> None:
        for pool, told in zip(self.pools, self.told, strict=True):
            pool.check()
            used = sum(-(-tokens // PAGE_TOKENS) for tokens, _ in told.values())
            assert pool.free_tokens == (PAGES - used) * PAGE_TOKENS
            for name, (_, numbers) in told.items():
                if numbers:
                    rows = pool.take(name, 0, len(numbers))
                    assert rows.tokens == len(numbers)
                    for keys, values in zip(rows.keys, rows.values, strict=True):
                        assert keys[:, 0, 1].tolist() == numbers
                        assert (-values[:, 0, 0]).tolist() == numbers


TestPools = Pools.TestCase
TestPools.settings = examples(40, stateful_step_count=30)
