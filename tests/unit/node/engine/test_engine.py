"""The engine computes what ``transformers`` computes, however the work is cut up."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from dht.messages.session import Sampling
from node.engine.engine import Engine, WorkItem, WorkResult
from tests.unit.node.engines import loaded

LAYERS, VOCAB, CONTEXT = 4, 97, 512
GREEDY = Sampling()
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 24, "head_dim": 16}),
}
"""Without and with windows; ``model/test_families.py`` has all others."""


@dataclass
class Family:
    """A tiny random model on disk and in ``transformers``."""

    directory: Path
    model: Any
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def logits(self, ids: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([ids])).logits[0]
        return logits

    def greedy(self, ids: tuple[int, ...], new: int) -> list[int]:
        prompt = torch.tensor([ids])
        with torch.inference_mode():
            out = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=new,
                pad_token_id=0,
            )
        answer: list[int] = out[0, len(ids) :].tolist()
        return answer

    def engine(self, start: int = 0, end: int = LAYERS, memory_bytes: int = 64 << 20) -> Engine:
        return loaded(self.directory, start, end, memory_bytes=memory_bytes)


def make(directory: Path, family: str) -> Family:
    config_type, model_type, extra = FAMILIES[family]
    torch.manual_seed(1)
    # A wide initialisation, so that a wrong token in the context shows.
    model = model_type(config_type(**SHAPE, initializer_range=0.2, **extra)).eval()
    model.save_pretrained(directory)
    return Family(directory, model)


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make(tmp_path_factory.mktemp("llama"), "llama")


def prompt_of(tokens: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (tokens,), generator=generator).tolist())


def only(results: list[WorkResult]) -> WorkResult:
    assert len(results) == 1
    assert results[0].error is None, results[0].error
    return results[0]


def through(
    engines: Sequence[Engine],
    position: int,
    ids: tuple[int, ...],
    sampling: Sampling | None,
    *,
    foretells: bool = False,
    **more: Any,
) -> WorkResult:
    """One chunk through all engines in turn; the last one draws, unless ``sampling`` is None."""
    hidden: torch.Tensor | None = None
    for engine in engines:
        start, end = engine.held
        item = WorkItem(
            session="s",
            start=start,
            end=end,
            position=position,
            token_ids=ids if start == 0 else None,
            hidden=hidden,
            sampling=sampling if end == engine.spec.layers else None,
            foretells=foretells and end == engine.spec.layers,
            **more,
        )
        result = only(engine.step([item]))
        hidden = result.hidden
    return result


def generate(
    engines: list[Engine], ids: tuple[int, ...], new: int, chunk: int = CONTEXT
) -> list[int]:
    for engine in engines:
        assert engine.kv.reserve("s", len(ids) + new) is None
    for at in range(0, len(ids), chunk):
        part = ids[at : at + chunk]
        result = through(engines, at, part, GREEDY if at + len(part) == len(ids) else None)
    answer = [result.token_id]
    while len(answer) < new:
        result = through(engines, len(ids) + len(answer) - 1, (answer[-1],), GREEDY)
        answer.append(result.token_id)
    for engine in engines:
        engine.kv.free("s")
    return answer


def test_full_range_generates_what_transformers_generates(family: Family) -> None:
    engine = family.engine()
    for tokens in (1, 7, 300):
        ids = prompt_of(tokens)
        expected = family.greedy(ids, 8)
        assert generate([engine], ids, 8) == expected
        assert generate([engine], ids, 8, chunk=64) == expected


@pytest.mark.parametrize("cuts", [(0, 2, 4), (0, 1, 3, 4)])
def test_split_engines_generate_what_transformers_generates(
    family: Family, cuts: tuple[int, ...]
) -> None:
    engines = [family.engine(a, b) for a, b in itertools.pairwise(cuts)]
    for tokens in (1, 7, 300):
        ids = prompt_of(tokens)
        assert generate(engines, ids, 6, chunk=64) == family.greedy(ids, 6)


def hidden_after(family: Family, ids: tuple[int, ...], layers: int) -> torch.Tensor:
    with torch.inference_mode():
        out = family.model(torch.tensor([ids]), output_hidden_states=True)
    hidden: torch.Tensor = out.hidden_states[layers][0]
    return hidden


def test_hidden_states_and_logits_are_close(family: Family) -> None:
    ids = prompt_of(60)
    engine = family.engine()
    engine.kv.reserve("s", 60)
    parts = []
    for at in range(0, 60, 25):
        item = WorkItem(session="s", start=0, end=3, position=at, token_ids=ids[at : at + 25])
        parts.append(only(engine.step([item])).hidden)
    hidden = torch.cat([part for part in parts if part is not None])
    torch.testing.assert_close(hidden, hidden_after(family, ids, 3), atol=1e-4, rtol=1e-4)
    logits: list[torch.Tensor] = []
    head = engine.loaded.head
    assert head is not None
    head.register_forward_hook(lambda module, given, out: logits.append(out))
    engine.kv.reserve("rest", 60)
    item = WorkItem(session="rest", start=3, end=4, position=0, hidden=hidden, sampling=GREEDY)
    only(engine.step([item]))
    torch.testing.assert_close(logits[0][0], family.logits(ids)[-1], atol=1e-4, rtol=1e-4)


def test_sessions_at_other_positions_and_sub_ranges_share_a_step(family: Family) -> None:
    engine = family.engine(1, 4)
    lengths = {"a": (40, 1, 4), "b": (9, 2, 3), "c": (30, 1, 2), "d": (17, 3, 4), "e": (1, 1, 4)}
    prompts = {name: prompt_of(n, seed=n) for name, (n, _, _) in lengths.items()}
    entering = {n: hidden_after(family, prompts[n], s) for n, (_, s, _) in lengths.items()}
    for name, (tokens, _, _) in lengths.items():
        assert engine.kv.reserve(name, tokens) is None
    done = dict.fromkeys(lengths, 0)
    chunks = {"a": 13, "b": 9, "c": 7, "d": 1, "e": 1}
    leaving: dict[str, list[torch.Tensor]] = {name: [] for name in lengths}
    tokens_out: dict[str, int | None] = {}
    while any(done[name] < lengths[name][0] for name in lengths):
        items = []
        for name, (tokens, start, end) in lengths.items():
            at, size = done[name], min(chunks[name], tokens - done[name])
            if size:
                last = at + size == tokens and end == LAYERS
                items.append(
                    WorkItem(
                        session=name,
                        start=start,
                        end=end,
                        position=at,
                        hidden=entering[name][at : at + size],
                        sampling=GREEDY if last else None,
                    )
                )
                done[name] += size
        for item, result in zip(items, engine.step(items), strict=True):
            assert result.error is None
            assert result.item is item
            if result.hidden is not None:
                leaving[item.session].append(result.hidden)
            if item.sampling is not None:
                tokens_out[item.session] = result.token_id
    for name, (_, _, end) in lengths.items():
        if end < LAYERS:
            expected = hidden_after(family, prompts[name], end)
            torch.testing.assert_close(torch.cat(leaving[name]), expected, atol=1e-4, rtol=1e-4)
        else:
            assert tokens_out[name] == int(family.logits(prompts[name])[-1].argmax())


def test_scattered_pages_give_the_same_answer(family: Family) -> None:
    ids = prompt_of(70)
    expected = family.greedy(ids, 6)
    engine = family.engine()
    page = engine.config.page_tokens
    pages = engine.kv.free_tokens // page
    for index in range(pages):  # every second page stays held
        assert engine.kv.reserve(f"hold-{index}", page) is None
    for index in range(0, pages, 2):
        engine.kv.free(f"hold-{index}")
    assert generate([engine], ids, 6) == expected
    assert generate([engine], ids, 6, chunk=33) == expected


def test_a_bad_item_leaves_the_others_untouched(llama: Family) -> None:
    ids = prompt_of(12)
    engine = llama.engine()
    for name in ("good", "long", "outside", "vocabulary", "width", "negative", "empty", "both"):
        assert engine.kv.reserve(name, 16) is None
    width = SHAPE["hidden_size"]
    whole = {"start": 0, "end": LAYERS, "position": 0}
    bad = {
        "unknown": WorkItem(session="unknown", token_ids=ids, **whole),
        "long": WorkItem(session="long", token_ids=prompt_of(17), **whole),
        "outside": WorkItem(
            session="outside", start=2, end=LAYERS + 1, position=0, hidden=torch.zeros(1, width)
        ),
        "vocabulary": WorkItem(session="vocabulary", token_ids=(1, VOCAB), **whole),
        "width": WorkItem(
            session="width", start=1, end=2, position=0, hidden=torch.zeros(3, width + 1)
        ),
        "negative": WorkItem(session="negative", token_ids=(1, -1), **whole),
        "empty": WorkItem(session="empty", **whole),
        "both": WorkItem(session="both", start=0, end=2, position=-1, token_ids=(1,)),
    }
    good = WorkItem(session="good", token_ids=ids, sampling=GREEDY, **whole)
    results = engine.step([*list(bad.values())[:3], good, *list(bad.values())[3:]])
    assert [result.error is None for result in results].count(True) == 1
    assert results[3].token_id == llama.greedy(ids, 1)[0]
    for item, result in zip(bad.values(), results[:3] + results[4:], strict=True):
        assert result.item is item
        assert result.error, item.session


def test_two_items_of_a_session_in_one_step_are_refused(llama: Family) -> None:
    engine = llama.engine()
    engine.kv.reserve("s", 8)
    item = WorkItem(session="s", start=0, end=LAYERS, position=0, token_ids=(1, 2))
    first, second = engine.step([item, item])
    assert first.error is None
    assert second.error is not None


def test_a_freed_session_gets_an_error(llama: Family) -> None:
    engine = llama.engine()
    engine.kv.reserve("s", 8)
    engine.kv.free("s")
    item = WorkItem(session="s", start=0, end=LAYERS, position=0, token_ids=(1,))
    assert engine.step([item])[0].error is not None


def test_an_item_that_skips_positions_is_refused(llama: Family) -> None:
    """Pages are not wiped between sessions: a gap would show what an earlier one left there."""
    ids = prompt_of(30)
    engine = llama.engine()
    for name in ("before", "gap"):
        assert engine.kv.reserve(name, 40) is None
        whole = {"session": name, "start": 0, "end": LAYERS}
        only(engine.step([WorkItem(position=0, token_ids=ids[:20], **whole)]))
        if name == "before":
            engine.kv.free(name)
    skipping = WorkItem(position=21, token_ids=ids[21:], **whole)
    assert "21" in (engine.step([skipping])[0].error or "")
    item = WorkItem(position=20, token_ids=ids[20:], sampling=GREEDY, **whole)
    assert only(engine.step([item])).token_id == llama.greedy(ids, 1)[0]
