"""The engine's steps on a GPU that is not there: devices, shapes, and who waits for whom.

No number is computed (:mod:`tests.unit.node.fake_cuda`); what the kernels do, how long they take
and how much memory there is stay unchecked until there is a GPU.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dht.messages.session import Sampling
from node.attention import paged_attention
from node.attention.block_table import BlockTable
from node.engine import engine as engine_module
from node.engine import kernel_trial, model_runner
from node.engine.engine import Engine, WorkItem, WorkResult
from node.engine.head_drafts import HeadDrafts
from node.engine.work_item import Features
from node.kernels import experts_in_turn, moe
from node.model.eagle_head import eagle_head
from node.model.execution import cuda_graphs
from node.model.execution.cuda_graphs import CudaGraphs
from node.model.layer_range import ModelLayout
from node.model.linear import quantize
from node.model.own_head import own_head
from node.sampling.token_history import PromptTargets, TokenHistory
from node.weights.store import WeightStore
from testing.random_model import make_llama
from testing.tiny_families import FAMILIES, add_own_head, make
from tests.unit.node.engine.eagle import FEATURES, foretold_target, write_head
from tests.unit.node.fake_cuda import FakeCuda, fake_cuda

pytest.importorskip("triton", reason="Triton has no wheels for this platform")

from node.kernels.triton.grouped_gemm import Groups
from tests.unit.node.engines import loaded

PAGE = 16
DEVICE = "cuda:1"
"""Not the current device, as with ``--gpu 1``."""
GREEDY = Sampling()
DRAWN = Sampling(temperature=0.8, top_k=5, seed=3)
CHANGED = Sampling(
    temperature=0.8, repetition_penalty=1.3, presence_penalty=0.4, min_new_tokens=4,
    stop_token_ids=(7,), logit_bias=((3, 2.0),), logprobs=3,
)  # fmt: skip
FIRST = (
    "llama, tied", "qwen3_moe", "gemma3", "gpt_oss", "deepseek_v3", "bloom", "llama4_text",
)  # fmt: skip
WAITING = {
    "qwen3_moe": 2, "mixtral": 2, "gpt_oss": 2, "granitemoe": 2, "olmoe": 2, "deepseek_v2": 2,
    "deepseek_v3": 2, "deepseek_v32": 4, "glm_moe_dsa": 4, "glm_moe_dsa, chosen before": 4,
    "minimax_m3": 4, "llama, dynamic rope": 1, "falcon, alibi": 4, "falcon, rotary": 4,
    "glm4_moe": 2,
}  # fmt: skip
"""Families whose own code waits for the device in a step, and how often in a layer at most, with
two sessions."""


def engine_of(directory: Path, dtype: str, **more: Any) -> Engine:
    return loaded(directory, device=DEVICE, dtype=dtype, memory_bytes=32 << 20, **more)


def graphs_of(engine: Engine) -> CudaGraphs:
    graphs = engine.loaded.forward.graphs
    assert graphs is not None
    return graphs


def item(engine: Engine, session: str, ids: tuple[int, ...], at: int, **more: Any) -> WorkItem:
    given = {"start": 0, "end": engine.spec.layers, "sampling": GREEDY, **more}
    return WorkItem(session=session, position=at, token_ids=ids, **given)


def step(engine: Engine, seen: FakeCuda, items: list[WorkItem]) -> list[WorkResult]:
    seen.forget()
    results = engine.step(items)
    assert [result.error for result in results] == [None] * len(items)
    return results


def attend_nowhere(
    query: Tensor, keys: Tensor, values: Tensor, rows: BlockTable, *_: object
) -> Tensor:
    """In the place of a kernel: what it takes is on its device, what it gives has the shape."""
    blocks = [rows.blocks(size, single=single) for size, single in ((1, True), (16, False))]
    taken = [b for block in blocks if block is not None for b in (block.blocks, block.tokens)]
    for tensor in (query, keys, values, rows.pages, rows.segments, *taken):
        assert str(tensor.device) == DEVICE
    return query.new_empty(1, query.shape[2], query.shape[1], values.shape[2])


@pytest.fixture(autouse=True)
def _no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts are copied, as where there is no Triton; and no number here tells of another."""
    monkeypatch.setattr(model_runner.ModelRunner, "_is_causal", lambda *_: True)
    monkeypatch.setattr(engine_module, "pages_kernel", lambda *_: None)
    monkeypatch.setattr(engine_module, "experts_kernel", lambda *_: None)
    monkeypatch.setattr(engine_module, "rows_kernels", lambda *_: None)


def group_of_nothing(chosen: Tensor, experts: int) -> Groups:
    """In the place of a kernel, likewise."""
    assert str(chosen.device) == DEVICE
    pairs = chosen.new_empty(chosen.numel(), dtype=torch.int32)
    return Groups(order=pairs, ends=pairs.new_empty(experts), each=chosen.shape[1])


def product_of_nothing(
    rows: Tensor, weights: Tensor, bias: Tensor | None, groups: Groups, *, spread: bool,
    transposed: bool, shares: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """In the place of a kernel: what it takes is on its device, what it gives has the shape."""
    for tensor in (rows, weights, groups.order, groups.ends, *([] if spread else [shares])):
        assert str(tensor.device) == DEVICE
    assert rows.dtype == weights.dtype
    return rows.new_empty(groups.order.shape[0], weights.shape[2 if transposed else 1])


STATES = {"mamba", "falcon_h1", "qwen3_next", "lfm2"}
"""Their layers make their states on the device that they name, which is not here."""
OTHER_NUMBERS = {"llama, linear rope", "llama, yarn", "llama, llama3 rope", "qwen2, tied"}
"""Run the same operations as others here, on other numbers: there are none on these devices."""
families = [
    pytest.param(n, marks=[] if n in FIRST else pytest.mark.slow)
    for n in FAMILIES
    if n.partition(",")[0] not in STATES and n not in OTHER_NUMBERS
]


@pytest.mark.parametrize("name", families)
def test_every_step_stays_on_the_device(name: str, tmp_path: Path) -> None:
    every_kind_of_step(name, tmp_path)


@pytest.mark.parametrize("name", ["llama, tied", "gemma3", "gpt_oss", "bloom", "llama4_text"])
def test_every_step_by_pages_stays_on_the_device(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a kernel that reads contexts in place, whose trial finds nothing to object to."""
    monkeypatch.setattr(engine_module, "pages_kernel", lambda *_: attend_nowhere)
    monkeypatch.setattr(kernel_trial, "ERROR_MAX", 1.0)
    monkeypatch.setattr(cuda_graphs, "ROW_BUCKETS", (1, 2, 4))
    every_kind_of_step(name, tmp_path)


def test_steps_by_pages_are_captured_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None while answers wait, whatever the number of sessions and however long they are."""
    make(tmp_path, "llama")
    monkeypatch.setattr(engine_module, "pages_kernel", lambda *_: attend_nowhere)
    monkeypatch.setattr(kernel_trial, "ERROR_MAX", 1.0)
    monkeypatch.setattr(cuda_graphs, "ROW_BUCKETS", (1, 2, 4))
    monkeypatch.setattr(cuda_graphs, "CHUNK_BUCKETS", (32, 128))
    with fake_cuda() as seen:
        engine = engine_of(tmp_path, "bfloat16")
        assert len(seen.captures) == len(graphs_of(engine)) == 5
        assert len(set(seen.captures)) == 1
        for n in range(3):
            assert engine.kv.reserve(str(n), 200) is None
            step(engine, seen, [item(engine, str(n), (1,) * 100, 0)])
        for turn in range(40):
            step(engine, seen, [item(engine, str(n), (1,), 100 + turn) for n in range(3)])
            assert seen.waits == ["a list is read"]
            assert not seen.uploads
        assert (seen.replays, len(seen.captures)) == (43, 5)
        step(engine, seen, [item(engine, "0", (1,), 140), item(engine, "1", (1,) * 9, 140)])
        assert not seen.uploads
        step(engine, seen, [item(engine, "2", (1,) * 129, 0)])  # more than any graph takes
        assert (seen.replays, len(seen.captures)) == (44, 5)


@pytest.mark.parametrize("by_pages", [True, False], ids=["by pages", "by copies"])
@pytest.mark.parametrize("name", ["llama", "llama4_text"])
def test_scattered_pages_are_found_on_the_device(
    name: str, by_pages: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes, and decodes beside a prefill, of sessions whose pages are no run: in layers that
    attend by a predicate, too, which read a context by its slots."""
    make(tmp_path, name)
    if by_pages:
        monkeypatch.setattr(engine_module, "pages_kernel", lambda *_: attend_nowhere)
        monkeypatch.setattr(kernel_trial, "ERROR_MAX", 1.0)
        monkeypatch.setattr(cuda_graphs, "ROW_BUCKETS", (1, 2, 4))
    with fake_cuda() as seen:
        engine = engine_of(tmp_path, "bfloat16")
        names = [f"fragment {n}" for n in range(engine.kv.free_tokens // PAGE)]
        for fragment in names:
            assert engine.kv.reserve(fragment, PAGE) is None
        for fragment in names[::2]:
            engine.kv.free(fragment)
        for session in "abc":
            assert engine.kv.reserve(session, 4 * PAGE) is None
            step(engine, seen, [item(engine, session, (1,) * 40, 0)])
        for turn in range(3):
            step(engine, seen, [item(engine, session, (1,), 40 + turn) for session in "ab"])
            assert (seen.waits, seen.uploads) == (["a list is read"], [])
        step(engine, seen, [item(engine, "a", (1,), 43), item(engine, "c", (1,) * 9, 40)])
        assert (seen.waits, seen.uploads) == (["a list is read"], [])


def every_kind_of_step(name: str, tmp_path: Path) -> None:
    """Prefill, decode, both mixed, parts of the layers, sampling, scores; one wait in a step."""
    make(tmp_path, name)
    # It needs no device, and takes several times as long among fakes.
    layout = ModelLayout.of(WeightStore.open(str(tmp_path)), "bfloat16", device=DEVICE)
    with fake_cuda() as seen:
        engine = engine_of(tmp_path, "bfloat16", layout=layout)
        layers = engine.spec.layers
        own_waits = WAITING.get(name, 0) * layers
        for session in "abc":
            assert engine.kv.reserve(session, 64) is None
        step(engine, seen, [item(engine, "a", (1, 2, 3), 0), item(engine, "b", (4,) * 20, 0)])
        assert len(seen.waits) <= 1 + 2 * own_waits
        both = [item(engine, "a", (1,), 3), item(engine, "b", (5,), 20)]
        step(engine, seen, both)  # captures where that is possible
        step(engine, seen, [item(engine, "a", (1,), 4), item(engine, "b", (5,), 21)])
        waits, uploads = len(seen.waits), len(seen.uploads)
        assert waits == 1 or 1 < waits <= 1 + own_waits, seen.waits
        assert uploads <= own_waits, seen.uploads
        chunk = item(engine, "c", (9,) * 17, 0, targets=PromptTargets(
            first_row=3, token_ids=(1, 2, 3), top=2
        ))  # fmt: skip
        mixed = step(engine, seen, [item(engine, "a", (1,), 5), chunk])
        assert mixed[1].prompt_scores
        changed = item(engine, "b", (5,), 22, sampling=CHANGED, history=TokenHistory((1, 2, 3)))
        drawn = item(engine, "a", (1,), 6, sampling=DRAWN)
        assert step(engine, seen, [drawn, changed])[1].scores
        assert len(seen.waits) <= 5 + own_waits, seen.waits  # the token, the scores, its logits
        # Another part of the layers for each: rows pass through those that they do not need.
        half, structure = layers // 2, engine.layout.structure
        rows = structure.trial_rows(half, torch.zeros(1, structure.row_width))
        engine.kv.free("a")
        assert engine.kv.reserve("a", 64) is None
        parts = [
            item(engine, "b", (5,), 23),
            WorkItem(session="a", start=half, end=layers, position=0, hidden=rows, sampling=GREEDY),
        ]
        step(engine, seen, parts)
        assert engine.kv.reserve("d", 64) is None
        leaving = step(engine, seen, [item(engine, "d", (9,), 0, end=half, sampling=None)])
        assert leaving[0].hidden is not None
        assert leaving[0].hidden.device.type == "cpu"
        assert len(seen.waits) <= 1 + own_waits


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_float32_and_graphs(name: str, tmp_path: Path) -> None:
    """Each size of step is captured once, on the device that is computed on, in one pool."""
    make(tmp_path, name)
    with fake_cuda(capability=(9, 0)) as seen:
        engine = engine_of(tmp_path, "float32")
        for n in range(3):
            assert engine.kv.reserve(str(n), 200) is None
            step(engine, seen, [item(engine, str(n), (1,) * 100, 0)])
        for turn in range(40):
            sessions = 1 if turn < 2 else 3
            step(engine, seen, [item(engine, str(n), (1,), 100 + turn - (0 if n == 0 else 2))
                                for n in range(sessions)])  # fmt: skip
            assert seen.waits == ["a list is read"]
            assert not seen.uploads
        assert len(graphs_of(engine)) == len(seen.captures) == 3  # rows and context have grown
        assert len(set(seen.captures)) == 1
        assert seen.replays == 40
        assert seen.streams.keys() == {1}  # nothing was asked of GPU 0
        engine.load(0, engine.spec.layers)
        assert not graphs_of(engine)
        assert engine.kv.reserve("0", 64) is None
        step(engine, seen, [item(engine, "0", (1,), 0)])
        assert len(set(seen.captures)) == 2  # nobody kept the old one alive


def test_what_waits_is_found_before_anything_is_captured(tmp_path: Path) -> None:
    """Products of groups of rows wait on most GPUs; a capture would fail at its end there."""
    make(tmp_path, "qwen3_moe")
    for capability, captures in (((8, 6), 0), ((7, 5), 0), ((9, 0), 1)):
        with fake_cuda(capability) as seen:
            engine = engine_of(tmp_path, "bfloat16")
            assert engine.kv.reserve("a", 64) is None
            for at in range(3):
                step(engine, seen, [item(engine, "a", (1,), at)])
            assert len(seen.captures) == captures
            assert not seen.forbidden


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral"])
def test_experts_need_not_wait(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a kernel that finds the groups itself; its trial finds nothing to object to."""
    make(tmp_path, name)
    kernel = SimpleNamespace(
        group=group_of_nothing,
        grouped_product=product_of_nothing,
        sum_each=experts_in_turn.sum_each,
        SOME_ROWS=16,
    )
    monkeypatch.setattr(engine_module, "experts_kernel", lambda *_: kernel)
    monkeypatch.setattr(moe, "ERROR_MAX", 1.0)
    with fake_cuda(capability=(8, 6)) as seen:
        engine = engine_of(tmp_path, "bfloat16")
        assert engine.kv.reserve("a", 64) is None
        for at in range(3):
            step(engine, seen, [item(engine, "a", (1,), at)])
            assert seen.waits == ["a list is read"]
            assert not seen.uploads
        assert (len(seen.captures), seen.replays) == (1, 3)


def test_a_stream_is_put_back_where_capturing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "llama")
    whole = paged_attention.attend_rows

    def fails(query: Tensor, *given: Any) -> Tensor:
        if seen.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return whole(query, *given)

    with fake_cuda() as seen:
        engine = engine_of(tmp_path, "float32")
        assert engine.kv.reserve("a", 64) is None
        monkeypatch.setattr(paged_attention, "attend_rows", fails)
        before = torch.cuda.current_stream(torch.device(DEVICE))
        step(engine, seen, [item(engine, "a", (1,), 0)])
        assert torch.cuda.current_stream(torch.device(DEVICE)) is before
        assert not seen.captures
        step(engine, seen, [item(engine, "a", (1,), 1)])


def test_a_session_moves(tmp_path: Path) -> None:
    """KV leaves a device for the CPU, and enters another."""
    make(tmp_path, "qwen3")
    with fake_cuda() as seen:
        one, other = engine_of(tmp_path, "bfloat16"), engine_of(tmp_path, "bfloat16")
        for engine in (one, other):
            assert engine.kv.reserve("a", 64) is None
        step(one, seen, [item(one, "a", (1,) * 20, 0)])
        rows = one.kv.take("a", 0, 20)
        assert {part.device.type for kept in rows.layers for part in kept} == {"cpu"}
        assert other.kv.put("a", rows) is None
        step(other, seen, [item(other, "a", (1,), 20)])


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_an_own_heads_steps_stay_on_the_device(name: str, tmp_path: Path) -> None:
    """For each token it waits once beside what its experts wait: its input is not looked at."""
    make(tmp_path, name)
    add_own_head(tmp_path, name)
    with fake_cuda() as seen:
        engine = engine_of(tmp_path, "bfloat16")
        head = own_head(engine.layout)
        assert head is not None
        heads = HeadDrafts(head, engine.config)
        heads.load(engine.loaded)
        for session in "ab":
            assert engine.kv.reserve(session, 64) is None
            heads.open(session, 64)
            ids = (1,) * 9
            begun = item(engine, session, ids, 0, foretells=True, following=ids[1:])
            heads.follow(step(engine, seen, [begun]))
        for at in (9, 10):
            items = [item(engine, session, (1,), at, foretells=True) for session in "ab"]
            results = step(engine, seen, items)
            assert {str(result.behind.device) for result in results} == {DEVICE}
            seen.forget()
            told = heads.follow(results)
            drafted = max(len(result.foretold) for result in told)
            assert drafted >= 1
            assert len(seen.waits) <= (1 + WAITING[name]) * drafted


def test_an_eagle_heads_steps_stay_on_the_device(tmp_path: Path) -> None:
    """For each token it waits once; its stage waits as it does without."""
    target = foretold_target(tmp_path / "target")
    files = WeightStore.open(str(write_head(tmp_path / "head", target)))
    with fake_cuda() as seen:
        engine = engine_of(target, "bfloat16")
        heads = HeadDrafts(eagle_head(engine.layout, files), engine.config)
        heads.load(engine.loaded)

        def given(session: str, ids: tuple[int, ...], at: int, *, takes: bool = True) -> WorkItem:
            features = Features(layers=FEATURES, rows=len(ids)) if takes else None
            following = ids[1:] if at == 0 else ()
            return item(
                engine, session, ids, at, foretells=True, following=following, features=features
            )

        for session in "ab":
            assert engine.kv.reserve(session, 64) is None
            heads.open(session, 64)
            heads.follow(step(engine, seen, [given(session, (1,) * 9, 0)]))
        waits = []
        for at, takes in ((9, False), (10, True), (11, True)):
            seen.forget()
            results = step(engine, seen, [given(name, (1,), at, takes=takes) for name in "ab"])
            waits.append(len(seen.waits))
            if not takes:
                assert all(result.behind is None for result in results)
                continue
            assert {str(result.behind.device) for result in results} == {DEVICE}
            seen.forget()
            told = heads.follow(results)
            drafted = max(len(result.foretold) for result in told)
            assert drafted >= 1
            assert len(seen.waits) <= drafted
        assert len(set(waits)) == 1


def test_quantised_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 8 bits; matrices in 4 bits are a kind of tensor of their own, which cannot be faked."""
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(quantize, "NUMBERS_MIN", 1)
    directory = make_llama(tmp_path, hidden=64, layers=2, vocab=64, context_tokens=64)
    with fake_cuda() as seen:
        engine = engine_of(directory, "bfloat16", quantize="int8")
        for session in "ab":
            assert engine.kv.reserve(session, 32) is None
            step(engine, seen, [item(engine, session, (1,) * 9, 0)])
        for at in (9, 10):
            step(engine, seen, [item(engine, session, (1,), at) for session in "ab"])
            assert seen.waits == ["a list is read"]
        assert len(graphs_of(engine)) == 1


# What these tests are there to find, planted.


def test_a_tensor_left_on_the_cpu_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "llama")
    monkeypatch.setattr(
        model_runner.ModelRunner,
        "_positions",
        lambda self, rows: torch.cat([torch.arange(r.item.tokens) for r in rows]),
    )
    with fake_cuda():
        engine = engine_of(tmp_path, "float32")
        assert engine.kv.reserve("a", 64) is None
        found = engine.step([item(engine, "a", (1, 2), 0)])[0].error
        assert "device" in (found or "")


def test_a_wait_within_the_layers_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "llama")
    whole = paged_attention.attend_rows

    def looks(query: Tensor, *given: Any) -> Tensor:
        assert float(query.max()) < 1e9
        return whole(query, *given)

    monkeypatch.setattr(paged_attention, "attend_rows", looks)
    with fake_cuda() as seen:
        engine = engine_of(tmp_path, "float32")
        assert engine.kv.reserve("a", 64) is None
        step(engine, seen, [item(engine, "a", (1,), 0)])
        assert not seen.captures
        step(engine, seen, [item(engine, "a", (1,), 1)])
        assert seen.waits == ["a number is read"] * 4 + ["a list is read"]
