"""An EAGLE-3 head on real engines: what it drafts, and that no token depends on it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dht.errors import UserError
from dht.messages.session import SESSION_BOUNDS, Sampling
from node.engine.engine import Engine
from node.engine.head_drafts import HeadDrafts
from node.engine.work_item import Features, WorkItem, WorkResult
from node.model.eagle_head import eagle_head, is_eagle_head
from node.weights.store import WeightStore
from testing.tiny_families import VOCAB, make
from tests.unit.node.engine.eagle import (
    FEATURES,
    LAYERS,
    Reference,
    foretold_target,
    write_head,
)
from tests.unit.node.engine.test_engine import only, prompt_of
from tests.unit.node.engines import loaded

NEW = 24
GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.9, top_p=0.9, top_k=20, seed=3)
CUTS = [(0, 8), (0, 4, 8), (0, 3, 5, 8), (0, 2, 4, 5, 8)]
"""Stages, whose ends are among the layers that the head looks in front of, and are not."""


engine_of = partial(loaded, keep_prefixes=False)


def heads_of(engine: Engine, head: Path) -> HeadDrafts:
    heads = HeadDrafts(eagle_head(engine.layout, WeightStore.open(str(head))), engine.config)
    heads.load(engine.loaded)
    return heads


@dataclass
class Ring:
    """Stages in one process, of which the last one has the head."""

    engines: list[Engine]
    heads: HeadDrafts

    @classmethod
    def of(cls, target: Path, head: Path, cuts: Sequence[int]) -> "Ring":
        engines = [engine_of(target, start, end) for start, end in itertools.pairwise(cuts)]
        return cls(engines, heads_of(engines[-1], head))

    def open(self, tokens: int) -> None:
        for engine in self.engines:
            assert engine.kv.reserve("s", tokens + SESSION_BOUNDS.draft_tokens_max) is None
        self.heads.open("s", tokens)

    def free(self) -> None:
        for each in (*(engine.kv for engine in self.engines), self.heads):
            each.free("s")

    def step(
        self,
        position: int,
        ids: tuple[int, ...],
        drafts: tuple[int, ...] = (),
        sampling: Sampling | None = None,
        following: tuple[int, ...] = (),
        featured: int | None = None,
    ) -> WorkResult:
        """``featured``: number of the last rows whose hidden states the head gets; all, if None."""
        hidden = came = None
        rows = len(ids) if featured is None else featured
        for engine in self.engines:
            start, end = engine.held
            here = tuple(layer for layer in FEATURES if start <= layer < end)
            features = None
            if rows and (here or came is not None):
                features = Features(layers=here, rows=rows, came=came)
            last = end == LAYERS
            item = WorkItem(
                session="s",
                start=start,
                end=end,
                position=position,
                token_ids=ids if start == 0 else None,
                hidden=hidden,
                drafts=drafts,
                features=features,
                sampling=sampling if last else None,
                foretells=last,
                following=following,
            )
            result = only(engine.step([item]))
            hidden, came = result.hidden, result.features
            before = sum(layer < end for layer in FEATURES)
            assert last or (0 if came is None else came.shape[1]) == (32 * before if rows else 0)
        (result,) = self.heads.follow([result])
        assert result.behind is None
        return result

    def answer(
        self, prompt: tuple[int, ...], sampling: Sampling, *, drafts: bool = True
    ) -> tuple[tuple[int, ...], int, int]:
        """An answer, how many tokens of it were drafted, and how many drafts were right."""
        self.open(len(prompt) + NEW)
        tokens: list[int] = []
        told: tuple[int, ...] = ()
        drafted = accepted = position = 0
        while len(tokens) < NEW:
            known = (*prompt, *tokens)
            end = min(position + 7, len(known))
            last = end == len(known)
            result = self.step(
                position,
                known[position:end] + told,
                told,
                sampling if last else None,
                known[position + 1 : end + 1],
            )
            position = end
            if last:
                accepted += len(result.token_ids) - 1
                tokens += result.token_ids
                position = len(prompt) + len(tokens) - 1
                told = result.foretold[: max(0, NEW - len(tokens) - 1)] if drafts else ()
                drafted += len(told)
        self.free()
        return tuple(tokens[:NEW]), drafted, accepted


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    make(directory, "llama", num_hidden_layers=LAYERS)
    return directory


@pytest.mark.parametrize(
    ("cuts", "width", "said"),
    [
        *((cuts, None, {}) for cuts in CUTS),
        (CUTS[-1], None, {"norm_before_residual": True}),
        (CUTS[-1], 48, {}),  # with its own embedding
    ],
    ids=str,
)
def test_it_drafts_what_it_drafts_in_plain_torch(
    target: Path, tmp_path: Path, cuts: tuple[int, ...], width: int | None, said: dict[str, bool]
) -> None:
    head = write_head(tmp_path, target, width=width, **said)
    expected = Reference(target, head, **said)
    ring = Ring.of(target, head, cuts)
    assert ring.heads.feature_layers == FEATURES
    ids = list(prompt_of(30, seed=4))
    ring.open(60)
    position = 0
    for end in (11, 30):  # a prompt in two chunks, then tokens one by one
        sampling = GREEDY if end == 30 else None
        following = tuple(ids[position + 1 : end + 1])
        result = ring.step(position, tuple(ids[position:end]), (), sampling, following)
        position = end
    told = 0
    for _ in range(10):
        ids += result.token_ids
        assert list(result.foretold) == expected.drafts(ids, len(result.foretold))
        told += len(result.foretold)
        result = ring.step(len(ids) - 1, (ids[-1],), (), GREEDY)
    assert told > 10


def test_it_begins_behind_rows_whose_hidden_states_did_not_come(
    target: Path, tmp_path: Path
) -> None:
    head = write_head(tmp_path, target)
    expected, ring = Reference(target, head), Ring.of(target, head, (0, 4, 8))
    ids = list(prompt_of(30, seed=4))
    ring.open(60)
    ring.step(0, tuple(ids[:20]), following=tuple(ids[1:21]), featured=0)
    result = ring.step(20, tuple(ids[20:]), (), GREEDY, tuple(ids[21:]), featured=6)
    for known in (6, 7):
        ids += result.token_ids
        features = expected.features(ids[:-1])[-known:]
        assert list(result.foretold) == expected.drafts(ids, len(result.foretold), features)
        result = ring.step(len(ids) - 1, (ids[-1],), (), GREEDY)
    ids += result.token_ids
    result = ring.step(len(ids) - 1, (ids[-1],), (), GREEDY, featured=0)
    assert not result.foretold
    ids += result.token_ids
    result = ring.step(len(ids) - 1, (ids[-1],), (), GREEDY)
    ids += result.token_ids
    assert list(result.foretold) == expected.drafts(
        ids, len(result.foretold), expected.features(ids[:-1])[-1:]
    )


@pytest.mark.parametrize(
    ("cuts", "right", "sampling"),
    [
        ((0, 8), True, GREEDY),
        ((0, 3, 5, 8), True, SAMPLED),
        ((0, 3, 5, 8), False, GREEDY),
    ],
    ids=["whole-right-greedy", "cut-right-sampled", "cut-wrong-greedy"],
)
def test_its_drafts_change_no_token_and_are_accepted_where_it_is_right(
    tmp_path: Path, sampling: Sampling, right: bool, cuts: tuple[int, ...]
) -> None:
    """A head that is right is wrong at times, too."""
    target = foretold_target(tmp_path / "target")
    ring = Ring.of(target, write_head(tmp_path / "head", target, right=right), cuts)
    for seed in range(3):
        prompt = prompt_of(20, seed=seed)
        plain, none, _ = ring.answer(prompt, sampling, drafts=False)
        tokens, drafted, accepted = ring.answer(prompt, sampling)
        assert tokens == plain
        assert none == 0 < drafted
        assert accepted > 0 or not right


def test_heads_are_told_by_their_tensors(target: Path, tmp_path: Path) -> None:
    assert is_eagle_head(WeightStore.open(str(write_head(tmp_path, target))))
    assert not is_eagle_head(WeightStore.open(str(target)))


@pytest.mark.parametrize(
    ("said", "layers"),
    [
        ({}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, (1, 3, 7)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, (2, 4, 5)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 4, 5)),
    ],
    ids=["usual", "named", "named by the layers before", "not named"],
)
def test_it_says_in_front_of_which_layers_it_looks(
    target: Path, tmp_path: Path, said: dict[str, object], layers: tuple[int, ...]
) -> None:
    engine = engine_of(target, 0, 1)
    head = WeightStore.open(str(write_head(tmp_path, target, **said)))
    assert eagle_head(engine.layout, head).feature_layers == layers


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, r"in front of layers \[2, 4, 8\] of 8"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, r"in front of layers \[2, 4\] of 8"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 4]}, r"in front of layers \[2, 4, 4\] of 8"),
        ({"eagle_aux_hidden_state_layer_ids": [-1, 4, 5]}, r"in front of layers \[-1, 4, 5\] of"),
        ({"eagle_aux_hidden_state_layer_ids": ["2"] * 3}, "in front of layers"),
        ({"norm_output": True}, "goes on from normed output"),
    ],
)
def test_what_is_no_head_for_the_model_is_refused(
    target: Path, tmp_path: Path, said: dict[str, object], reason: str
) -> None:
    engine = engine_of(target, 0, 1)
    head = WeightStore.open(str(write_head(tmp_path, target, **said)))
    with pytest.raises(UserError, match=reason):
        eagle_head(engine.layout, head)


def changed(head: Path, **tensors: torch.Tensor | None) -> WeightStore:
    """The head with other tensors, or without some."""
    path = head / "model.safetensors"
    known = load_file(path) | {name: made for name, made in tensors.items() if made is not None}
    gone = {name for name, made in tensors.items() if made is None}
    kept = {name: made for name, made in known.items() if name not in gone}
    save_file(kept, path, metadata={"format": "pt"})
    return WeightStore.open(str(head))


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"fc.weight": torch.zeros(32, 64)}, r"\[32, 64\]; \[32, 96\] fits the model"),
        ({"d2t": None}, f"80 tokens of {VOCAB}, and does not say which"),
        ({"d2t": torch.zeros(3, dtype=torch.long)}, r"d2t has the shape \[3\]"),
        ({"fc_norm.weight": torch.zeros(96)}, "fc_norm.weight, which no EAGLE-3 head has"),
        ({"embed_tokens.weight": torch.zeros(5, 32)}, r"shape \[5, 32\]"),
        ({"midlayer.mlp.up_proj.weight": None}, "no tensor for model.layers.0.mlp.up_proj"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    target: Path, tmp_path: Path, tensors: dict[str, torch.Tensor | None], reason: str
) -> None:
    engine = engine_of(target, 0, 1)
    with pytest.raises(UserError, match=reason):
        eagle_head(engine.layout, changed(write_head(tmp_path, target), **tensors))


@pytest.mark.parametrize("wrong", [VOCAB, -80, 1 << 40])
def test_tokens_beyond_the_models_are_refused_at_the_load(
    target: Path, tmp_path: Path, wrong: int
) -> None:
    store = changed(write_head(tmp_path, target), d2t=torch.full((80,), wrong))
    engine = engine_of(target, 0, LAYERS)
    heads = HeadDrafts(eagle_head(engine.layout, store), engine.config)
    with pytest.raises(UserError, match="tokens beyond the model's 101"):
        heads.load(engine.loaded)
    assert not heads.held
