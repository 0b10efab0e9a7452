"""A model's own head on real engines: what it drafts, and that no token depends on it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from dht.messages.session import SESSION_BOUNDS, Sampling
from node.engine.engine import Engine, EngineConfig
from node.engine.head_drafts import HeadDrafts
from node.engine.work_item import WorkItem, WorkResult
from node.model.own_head import own_head
from node.packed.tensor import is_packed
from node.weights.store import WeightStore
from testing.packed_checkpoints import FORMATS, write
from testing.tiny_families import HEADED, LAYERS, VOCAB, add_own_head, make
from tests.unit.node.engine.test_engine import prompt_of, through

NEW = 24
WIDE = {
    **dict.fromkeys(("hidden_size", "moe_intermediate_size"), 64),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    "intermediate_size": 128,
    "v_head_dim": 16,
}
"""Widths that all formats' blocks divide."""
GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.9, top_p=0.9, top_k=20, seed=3)


@dataclass
class Headed:
    """A tiny model with a head of its own, on disk."""

    directory: Path
    name: str

    def engine(self, start: int, end: int) -> Engine:
        store = WeightStore.open(str(self.directory))
        config = EngineConfig(store=store, name="tiny", memory_bytes=64 << 20, keep_prefixes=False)
        engine = Engine(config)
        engine.load(start, end)
        return engine

    def heads(self, engine: Engine) -> HeadDrafts:
        head = own_head(engine.layout)
        assert head is not None
        heads = HeadDrafts(head, engine.config)
        heads.load(engine.loaded)
        return heads


def written(directory: Path, name: str) -> Headed:
    make(directory, name)
    add_own_head(directory, name)
    return Headed(directory, name)


@pytest.fixture(scope="module", params=HEADED)
def headed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Headed:
    return written(tmp_path_factory.mktemp(request.param), request.param)


def foretelling(directory: Path, name: str, layers: int = LAYERS) -> Headed:
    """A model whose head is often right: both mostly say what the output head makes of the newest
    token's embedding."""
    make(directory, name, num_hidden_layers=layers)
    add_own_head(directory, name, num_hidden_layers=layers, copies_embedding=True)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] += 1.5 * tensors["model.embed_tokens.weight"].roll(7, dims=0)
    tensors["model.embed_tokens.weight"] *= 3
    save_file(tensors, path, metadata={"format": "pt"})
    return Headed(directory, name)


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe"])
def right(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Headed:
    return foretelling(tmp_path_factory.mktemp(request.param), request.param)


def reference(headed: Headed) -> tuple[Any, Any]:
    """The model and its head, as transformers has them."""
    model = AutoModelForCausalLM.from_pretrained(headed.directory, dtype=torch.float32).eval()
    model._keys_to_ignore_on_load_unexpected = [rf"^model\.layers\.{LAYERS}\.", r"^mtp\."]
    model.config.num_mtp_layers = 1
    model.config.mtp_layer_types, model.config.mtp_mlp_layer_types = ["full_attention"], ["sparse"]
    return model, MtpModel.from_pretrained(model).eval()


def drafted_by(reference: tuple[Any, Any], ids: Sequence[int]) -> int:
    """What the reference drafts behind ``ids``, the last of which was drawn just now."""
    model, head = reference
    given = torch.tensor([ids])
    with torch.inference_mode():
        out = model(given[:, :-1], output_hidden_states=True, use_cache=False)
        drafted, _, _ = head(
            input_ids=given[:, 1:],
            last_hidden_states=out.hidden_states[-1],
            attention_mask=None,
            position_ids=torch.arange(1, len(ids))[None],
            mtp_cache=MtpCache(config=model.config.get_mtp_config()),
        )
    return int(drafted[0, 0])


def step(
    engines: Sequence[Engine],
    heads: HeadDrafts | None,
    position: int,
    ids: tuple[int, ...],
    drafts: tuple[int, ...],
    sampling: Sampling | None,
    following: tuple[int, ...] = (),
) -> WorkResult:
    """Token ids, the last of them drafted, through all engines in turn, then the head."""
    result = through(
        engines,
        position,
        ids,
        sampling,
        foretells=heads is not None,
        drafts=drafts,
        following=following,
    )
    if heads is not None:
        (result,) = heads.follow([result])
        assert result.behind is None
    return result


@dataclass
class Told:
    tokens: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0


def answer(
    engines: Sequence[Engine],
    heads: HeadDrafts | None,
    prompt: tuple[int, ...],
    sampling: Sampling,
    *,
    chunk: int = 7,
    knows: bool = True,
    lost_at: int | None = None,
) -> Told:
    """An answer whose drafts are the head's; ``knows``: whether the head is told the prompt.

    After ``lost_at`` tokens the last stage is another one, to which all rows come again.
    """
    tokens: list[int] = []
    told = Told(())
    for engine in engines:
        assert engine.kv.reserve("s", len(prompt) + NEW + SESSION_BOUNDS.draft_tokens_max) is None
    if heads is not None:
        heads.open("s", len(prompt) + NEW)
    drafts: tuple[int, ...] = ()
    position = 0
    while len(tokens) < NEW:
        if lost_at is not None and len(tokens) >= lost_at:
            lost_at, position, drafts = None, 0, ()
            if heads is not None:
                heads.free("s")
                heads.open("s", len(prompt) + NEW)
        known = (*prompt, *tokens)
        end = min(position + chunk, len(known))
        following = known[position + 1 : end + 1] if knows else ()
        last = end == len(known)
        result = step(
            engines,
            heads,
            position,
            known[position:end] + drafts,
            drafts,
            sampling if last else None,
            following,
        )
        position = end
        if not last:
            continue
        told.accepted += max(0, len(result.token_ids) - 1)
        tokens += result.token_ids
        position = len(prompt) + len(tokens) - 1
        drafts = result.foretold[: max(0, NEW - len(tokens) - 1)]
        told.drafted += len(drafts)
    for engine in engines:
        engine.kv.free("s")
    if heads is not None:
        heads.free("s")
    told.tokens = tuple(tokens[:NEW])
    return told


def test_it_drafts_what_transformers_head_drafts(headed: Headed) -> None:
    expected, engine = reference(headed), headed.engine(0, LAYERS)
    heads = headed.heads(engine)
    ids = list(prompt_of(30, seed=4))
    assert engine.kv.reserve("s", 60) is None
    heads.open("s", 60)
    same, position = 0, 0
    for end in (11, 30):  # a prompt in two chunks, then tokens one by one
        chunk, sampling = tuple(ids[position:end]), GREEDY if end == 30 else None
        following = tuple(ids[position + 1 : end + 1])
        result = step([engine], heads, position, chunk, (), sampling, following)
        position = end
    for _ in range(12):
        ids += result.token_ids
        same += result.foretold[0] == drafted_by(expected, ids)
        result = step([engine], heads, len(ids) - 1, (ids[-1],), (), GREEDY)
    assert same == 12


@pytest.mark.parametrize(
    ("cuts", "sampling"),
    [((0, LAYERS), GREEDY), ((0, 3, LAYERS), SAMPLED)],
    ids=["whole-greedy", "cut-sampled"],
)
def test_its_drafts_change_no_token_and_are_accepted_where_it_is_right(
    right: Headed, sampling: Sampling, cuts: tuple[int, ...]
) -> None:
    """What is drawn and where layers are cut meet nowhere: drawing follows the last layer."""
    engines = [right.engine(start, end) for start, end in itertools.pairwise(cuts)]
    heads, prompt = right.heads(engines[-1]), prompt_of(20)
    plain = answer(engines, None, prompt, sampling)
    for knows, lost_at in ((True, None), (False, None), (True, 9), (False, 9)):
        drafted = answer(engines, heads, prompt, sampling, knows=knows, lost_at=lost_at)
        assert drafted.tokens == plain.tokens
        assert 0 < drafted.accepted < drafted.drafted


def test_ids_of_another_vocabulary_are_left_out(right: Headed) -> None:
    engine, ids = right.engine(0, LAYERS), prompt_of(9)
    heads = right.heads(engine)
    assert engine.kv.reserve("s", 40) is None
    heads.open("s", 40)
    for strange in (VOCAB, 1 << 24):
        result = step([engine], heads, 0, ids, (), GREEDY, (*ids[1:], strange))
        assert result.foretold, "from the drawn token alone"
        assert heads._rows["s"].first == len(ids) - 1


def test_sessions_of_one_step_are_drafted_as_each_alone(right: Headed) -> None:
    engine = right.engine(0, LAYERS)
    heads, names = right.heads(engine), ("a", "b", "c")
    prompts = {name: prompt_of(5 + 6 * at, seed=at) for at, name in enumerate(names)}

    def foretold(batches: Sequence[tuple[str, ...]]) -> dict[str, tuple[int, ...]]:
        told = {}
        for batch in batches:
            items = []
            for name in batch:
                ids = prompts[name]
                assert engine.kv.reserve(name, 40) is None
                if name != "c":  # one that the head has no room for
                    heads.open(name, 40)
                items.append(
                    WorkItem(
                        session=name,
                        start=0,
                        end=LAYERS,
                        position=0,
                        token_ids=ids,
                        sampling=SAMPLED,
                        foretells=True,
                        following=ids[1:] if name == "a" else (),
                    )
                )
            for result in heads.follow(engine.step(items)):
                assert result.error is None
                told[result.item.session] = result.foretold
        for name in names:
            engine.kv.free(name)
            heads.free(name)
        return told

    together = foretold([names])
    assert together == foretold([(name,) for name in names])
    assert [bool(together[name]) for name in names] == [True, True, False]


@pytest.mark.parametrize("packing", ["fp8", "compressed-tensors, int4"])
def test_a_packed_head_drafts_what_its_numbers_draft(tmp_path: Path, packing: str) -> None:
    places = {name: tmp_path / name for name in ("plain", "packed", "meant")}
    make(places["plain"], "deepseek_v3", **WIDE)
    add_own_head(places["plain"], "deepseek_v3", **WIDE)
    write(places["plain"], FORMATS[packing], places["packed"], places["meant"])
    told, ids = [], prompt_of(20)
    for name in ("packed", "meant"):
        headed = Headed(places[name], "deepseek_v3")
        engine = headed.engine(0, LAYERS)
        heads = headed.heads(engine)
        assert is_packed(heads._engine.loaded.layers[0]) == (name == "packed")
        assert engine.kv.reserve("s", 40) is None
        heads.open("s", 40)
        result = step([engine], heads, 0, ids, (), GREEDY, ids[1:])
        told.append((result.token_ids, result.foretold))
    assert told[0] == told[1]
    assert told[0][1]


def test_it_drafts_no_further_than_the_context_and_its_room(
    right: Headed, caplog: pytest.LogCaptureFixture
) -> None:
    engine = right.engine(0, LAYERS)
    heads, most = right.heads(engine), engine.spec.context_tokens
    ids = prompt_of(most - 1)
    assert engine.kv.reserve("s", most) is None
    heads.open("s", most)
    result = step([engine], heads, 0, ids, (), GREEDY, ids[1:])
    assert len(result.foretold) == 2, "one behind the last row, and one behind the last position"
    engine.kv.free("s")
    heads.free("s")
    page_tokens = engine.config.page_tokens
    assert heads._engine.kv.reserve("rest", heads._engine.kv.free_tokens - page_tokens) is None
    assert engine.kv.reserve("s", most) is None
    heads.open("s", most)
    result = step([engine], heads, 0, ids[:64], (), GREEDY, ids[1:64])
    assert result.foretold == (), "the prompt has no room"
    result = step([engine], heads, 64, result.token_ids, (), GREEDY)
    assert result.foretold, "what follows has"
    assert not caplog.records


@pytest.mark.parametrize("entered", [False, True])
def test_a_head_that_fails_in_a_session_is_not_tried_again_there(
    right: Headed, monkeypatch: pytest.MonkeyPatch, entered: bool
) -> None:
    engine = right.engine(0, LAYERS)
    heads, ids, tried = right.heads(engine), prompt_of(8), []

    def fail(*_: object) -> Any:
        tried.append(1)
        raise RuntimeError("the head fails")

    if entered:
        monkeypatch.setattr(heads._engine._steps, "run", fail)
    else:
        monkeypatch.setattr(heads, "_entry", fail)
    assert engine.kv.reserve("s", 16) is None
    heads.open("s", 16)
    first = step([engine], heads, 0, ids, (), GREEDY, ids[1:])
    second = step([engine], heads, 8, first.token_ids, (), GREEDY)
    assert len(first.token_ids) == len(second.token_ids) == 1
    assert first.foretold == second.foretold == ()
    assert len(tried) == 1
    monkeypatch.undo()
    for holder in (engine.kv, heads):
        holder.free("s")
    assert engine.kv.reserve("s", 16) is None
    heads.open("s", 16)
    assert step([engine], heads, 0, ids, (), GREEDY, ids[1:]).foretold, "others are drafted"
