"""Whatever sessions do in two pools, each reads back exactly what it wrote or brought along."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dht.messages.prefix import BLOCK_TOKENS, block_names
from node.kv.layer_pool import LayerPool
from node.kv.page_names import PageNames
from node.kv.pool import KvPool
from tests.examples import examples
from tests.unit.node.kv.accounts import check_pool

PAGES, PAGE_TOKENS, LAYERS = 10, 4, (2, 4)
names = st.sampled_from("abcde")
places = st.sampled_from((0, 1))


words = st.lists(st.integers(0, 1), max_size=2)
"""A prompt's blocks, of few kinds: prompts begin alike."""


@dataclass
class Told:
    """What a session should read: the numbers of its own text, whoever wrote them."""

    reserved: int
    text: tuple[int, ...]
    """Tokens that it writes, one after the other."""
    at: int = 0
    """Tokens that are written."""


class Pools(RuleBasedStateMachine):
    """Sessions open, find what others left, grow, go back, are cancelled, exported and imported.

    A row holds a number that stands for all tokens up to it, as KV does.
    """

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
        self.told: list[dict[str, Told]] = [{}, {}]
        """By pool and session."""
        self.numbers: dict[tuple[int, ...], float] = {}
        self.opened = 0

    def numbers_of(self, told: Told, end: int) -> list[float]:
        texts = (told.text[: at + 1] for at in range(end))
        return [self.numbers.setdefault(text, float(len(self.numbers))) for text in texts]

    @rule(at=places, name=names, words=words, tokens=st.integers(1, PAGES * PAGE_TOKENS + 3))
    def open(self, at: int, name: str, words: list[int], tokens: int) -> None:
        if name in self.told[at]:
            return
        pool, free = self.pools[at], self.pools[at].free_tokens
        prompt = tuple(word for word in words for _ in range(BLOCK_TOKENS))
        self.opened += 1
        asked = PageNames(
            space=b"s",
            blocks=b"".join(block_names(b"", prompt)),
            answers=f"session {self.opened}",
            found_most=min(tokens, len(prompt) + 1) - 1,
        )
        found = pool.open(name, tokens, LAYERS, tokens, asked)
        if not pool.extend(name, tokens):
            assert tokens > free
            pool.free(name)
            return
        answer = (self.opened + 1,) * (PAGES * PAGE_TOKENS)
        self.told[at][name] = Told(reserved=tokens, text=(*prompt, *answer), at=found)

    @rule(at=places, name=names, tokens=st.integers(1, 20))
    def append(self, at: int, name: str, tokens: int) -> None:
        if name not in self.told[at]:
            return
        told = self.told[at][name]
        end = min(told.at + tokens, told.reserved)
        reservation = self.pools[at].get(name)
        assert reservation is not None
        if end <= told.at:
            return
        assert self.pools[at].grow(name, reservation, end)
        slots = self.pools[at].slots(reservation, end)[told.at :]
        fresh = torch.tensor(self.numbers_of(told, end)[told.at :])
        for pool in self.tensors[at].values():
            pool.write(slots, fresh[:, None, None].expand(-1, 1, 2), -fresh[:, None, None])
        self.pools[at].ran(name, reservation, told.at, end)
        told.at, reservation.layers = end, LAYERS

    @rule(at=places, name=names, share=st.floats(0, 1))
    def go_back(self, at: int, name: str, share: float) -> None:
        reservation = self.pools[at].get(name)
        if reservation is None:
            return
        told = self.told[at][name]
        position = int(share * told.at)
        if self.pools[at].rewind(name, reservation, position) is None:
            told.at = position
        else:  # it shares a page, and no other is free
            assert self.pools[at].free_tokens == 0
            self.cancel(at, name)

    @rule(at=places, name=names, tokens=st.integers(0, 1 << 20))
    def settle(self, at: int, name: str, tokens: int) -> None:
        """A neighbour says how many rows are right, and may say any number."""
        before = self.pools[at].get(name)
        known = 0 if before is None else before.settled
        self.pools[at].settle(name, tokens)
        if before is not None:
            assert before.settled == max(known, min(tokens, self.told[at][name].at))

    @rule(at=places, name=names)
    def cancel(self, at: int, name: str) -> None:
        self.pools[at].free(name)
        self.told[at].pop(name, None)
        with pytest.raises(KeyError):
            self.pools[at].take(name, 0, 1)

    @precondition(lambda self: any(told.at for each in self.told for told in each.values()))
    @rule(at=places, name=names, most=st.integers(1, 30))
    def move(self, at: int, name: str, most: int) -> None:
        """The other pool takes what it lacks of the session, as far as it has room."""
        there = 1 - at
        if name not in self.told[at] or name not in self.told[there]:
            return
        source, target = self.told[at][name], self.told[there][name]
        end = min(source.at, target.at + most)
        reservation = self.pools[at].get(name)
        if (
            reservation is None
            or reservation.layers is None
            or target.at >= end
            or source.text[:end] != target.text[:end]
        ):
            return
        rows = self.pools[at].take(name, target.at, most)
        refused = self.pools[there].put(name, rows)
        if end > target.reserved:
            assert refused is not None
            assert str(target.reserved) in refused
            return
        assert refused is None
        target.at = end

    @invariant()
    def each_reads_its_own(self) -> None:
        for pool, told in zip(self.pools, self.told, strict=True):
            check_pool(pool)
            used = sum(-(-each.reserved // PAGE_TOKENS) for each in told.values())
            assert pool.free_tokens >= (PAGES - used) * PAGE_TOKENS, "what is kept is free"
            for name, each in told.items():
                reservation = pool.get(name)
                assert reservation is not None
                assert reservation.written == each.at
                if each.at:
                    reservation.layers = LAYERS
                    rows = pool.take(name, 0, each.at)
                    assert rows.tokens == each.at
                    for keys, values in rows.layers:
                        assert keys[:, 0, 1].tolist() == self.numbers_of(each, each.at)
                        assert (-values[:, 0, 0]).tolist() == self.numbers_of(each, each.at)


TestPools = Pools.TestCase
TestPools.settings = examples(60, stateful_step_count=30)
