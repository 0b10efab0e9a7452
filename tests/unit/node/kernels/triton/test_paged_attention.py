"""Attention straight from pages: the same numbers as in the open, the same answers, refused where
it differs. Without a GPU the kernel is interpreted on the CPU."""

import logging
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dht.errors import MachineError
from dht.messages.session import Sampling
from node.attention.block_table import AttendPages, BlockTable
from node.attention.mask_rules import MaskRule
from node.attention.paged_attention import attend_openly
from node.attention.segment import Segment
from node.engine import kernel_trial
from node.engine.engine import Engine, WorkItem
from node.model.execution import cuda_graphs
from testing.tiny_families import make
from tests.unit.node.attention.test_block_table import part_of
from tests.unit.node.model.execution.test_cuda_graphs import (
    PROMPTS,
    answers,
    engine_of,
    with_graphs,
)

pytest.importorskip("triton", reason="Triton has no wheels for this platform")

from node.kernels.triton import paged_attention
from node.kernels.triton.paged_attention import attend_pages, splits_of, tile_tokens

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE = 16


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False


PLAIN = Shape(8, 2, 32, 32)
DECODES = ((1, 40), (1, 7), (1, 100), (1, 16))
MIXED = ((5, 40), (1, 7), (35, 60), (1, 290))


def compared(
    shape: Shape, sessions: tuple[tuple[int, int], ...], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel gives, and what attention in the open gives in the same dtype."""
    generator = torch.Generator().manual_seed(7)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(DEVICE, dtype)

    free = torch.randperm(64, generator=generator).tolist()
    pools = [
        torch.full((64 * PAGE + 1, shape.kv_heads, width), float("nan"), dtype=dtype, device=DEVICE)
        for width in (shape.key_width, shape.value_width)
    ]
    parts: list[Segment] = []
    for rows, context in sessions:
        first = parts[-1].first + parts[-1].rows if parts else 0
        own = [free.pop() for _ in range(-(-context // PAGE))]
        parts.append(part_of(first, rows, context, own))
        for pool in pools:
            pool[slots_of(parts[-1])] = random(context, *pool.shape[1:])
    query = random(1, shape.heads, parts[-1].first + parts[-1].rows, shape.key_width)
    sinks = random(shape.heads) if shape.sinks else None
    scale = shape.key_width**-0.5
    given = attend_pages(
        query, *pools, BlockTable.of(parts, PAGE, DEVICE), sinks, shape.window, scale, shape.softcap
    )
    rule = MaskRule(window=shape.window)
    wanted = [
        attend_openly(
            query[0, :, part.first : part.first + part.rows],
            pools[0][slots_of(part)].permute(1, 2, 0),
            pools[1][slots_of(part)].transpose(0, 1),
            rule.allowed(part.rows, part.context_tokens, DEVICE),
            scale,
            shape.softcap or None,
            sinks,
        )
        for part in parts
    ]
    return given, torch.cat(wanted)[None]


def slots_of(part: Segment) -> torch.Tensor:
    rows = torch.tensor(part.pages)[:, None] * PAGE + torch.arange(PAGE)
    return rows.flatten()[: part.context_tokens].to(DEVICE)


@pytest.mark.parametrize("processors", [1, 12], ids=["whole", "split"])
@pytest.mark.parametrize("sessions", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize(
    "shape",
    [
        PLAIN,
        Shape(6, 2, 24, 40),  # widths and groups that are no power of two
        Shape(7, 1, 80, 80),
        Shape(4, 4, 48, 32),  # latent attention: keys wider than values
        Shape(8, 2, 32, 32, window=17),
        Shape(8, 2, 32, 32, window=64, softcap=30.0),
        Shape(8, 2, 32, 32, window=260, sinks=True),  # wide enough to be split
        Shape(8, 2, 32, 32, window=17, sinks=True),
        Shape(8, 2, 32, 32, sinks=True),
    ],
    ids=str,
)
def test_it_gives_what_attention_in_the_open_gives(
    shape: Shape,
    sessions: tuple[tuple[int, int], ...],
    processors: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was never written is no number here, and must not be read."""
    monkeypatch.setattr(paged_attention, "processors", lambda _: processors)
    given, wanted = compared(shape, sessions, torch.float32)
    assert torch.isfinite(given).all()
    assert (given - wanted).abs().max() < 1e-5


def test_a_staged_table_gives_what_a_steps_own_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of several sizes after each other, none of which leaves anything to the next; rows of
    padding give numbers, too."""
    room = BlockTable.room(16, 20 * PAGE, PAGE, 64, DEVICE, chunked=True)
    pool = torch.randn(64 * PAGE + 1, 2, 32, device=DEVICE)
    attend_pages(torch.randn(1, 8, 16, 32, device=DEVICE), pool, pool, room, None, 0, 0.2, 0.0)
    found: list[int] = []

    def counted(*given: int) -> int:
        found.append(splits_of(*given))
        return found[-1]

    monkeypatch.setattr(paged_attention, "splits_of", counted)
    for processors in (1, 400):
        monkeypatch.setattr(paged_attention, "processors", lambda _, n=processors: n)
        for sessions in (((5, 40), (1, 7), (9, 12)), ((3, 9), (1, 3)), ((1, 2), (2, 290))):
            parts: list[Segment] = []
            for rows, context in sessions:
                first = parts[-1].first + parts[-1].rows if parts else 0
                parts.append(part_of(first, rows, context, list(range(first, first + 19))))
            count = sum(part.rows for part in parts)
            query = torch.randn(1, 8, 16, 32, device=DEVICE)
            own = BlockTable.of(parts, PAGE, DEVICE)
            room.stage(own, 64)
            given = attend_pages(query, pool, pool, room, None, 0, 0.2, 0.0)
            wanted = attend_pages(query[:, :, :count], pool, pool, own, None, 0, 0.2, 0.0)
            assert (given[:, :count] - wanted).abs().max() < 1e-5
            assert torch.isfinite(given).all()
    assert {1, 2} <= set(found)


def test_queries_of_any_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads beside each other, rows beside each other, parts of something wider."""
    monkeypatch.setattr(paged_attention, "processors", lambda _: 1)
    pool = torch.randn(4 * PAGE + 1, 2, 24, device=DEVICE)
    rows = BlockTable.of([part_of(0, 5, 40, [2, 0, 1])], PAGE, DEVICE)
    wide = torch.randn(1, 5, 8, 75, device=DEVICE)
    given = [
        attend_pages(query, pool, pool, rows, None, 0, 0.2, 0.0)
        for query in (
            wide[..., 3:27].transpose(1, 2),
            wide[..., 3:27].transpose(1, 2).contiguous(),
            wide[..., 3:27].contiguous().transpose(1, 2),
        )
    ]
    assert torch.equal(given[0], given[1])
    assert torch.equal(given[0], given[2])


def test_half_precision() -> None:
    """bfloat16 is left to a GPU, as Triton's interpreter cannot multiply it."""
    given, wanted = compared(PLAIN, MIXED, torch.float16)
    assert (given - wanted).abs().max() < 4e-3


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA device")
def test_bfloat16_on_a_gpu() -> None:
    given, wanted = compared(PLAIN, MIXED, torch.bfloat16)
    assert (given - wanted).abs().max() < 3e-2


def engine_by_pages(directory: Path, kernel: AttendPages = attend_pages) -> Engine:
    engine = engine_of(directory, str(DEVICE))
    engine._attend_pages = kernel
    engine.load(0, engine.spec.layers)
    return engine


@pytest.fixture
def _small_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreting takes its time."""
    monkeypatch.setattr(kernel_trial, "CONTEXTS", (((1, 20), (5, 23)), ((1, 35),)))


SLOW = pytest.mark.slow
KINDS_OF_LAYERS = {"llama": 1, "mistral": 1, "llama4_text": 4}


@pytest.mark.usefixtures("_small_trial")
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gpt_oss",  # sinks, windows that alternate
        pytest.param("gemma2", marks=SLOW),  # scores capped softly
        pytest.param("deepseek_v3", marks=SLOW),  # latent attention
        pytest.param("llama4_text", marks=SLOW),  # some layers attend by a predicate
    ],
)
def test_answers_are_the_same(family: str, tmp_path: Path) -> None:
    made_small(tmp_path, family)
    expected = answers(engine_of(tmp_path, str(DEVICE)), PROMPTS[1:4], 3)
    engine = engine_by_pages(tmp_path)
    assert engine.reads_in_place
    assert answers(engine, PROMPTS[1:4], 3) == expected
    # Pages that are no run: others hold what would follow.
    fragments(engine)
    assert answers(engine, PROMPTS[1:4], 3) == expected
    assert answers(engine, PROMPTS[1:2], 3) == expected[:1]  # a prompt alone in its step


def made_small(directory: Path, family: str) -> None:
    """With a layer of each kind: another one takes as long and shows nothing more."""
    make(directory, family, num_hidden_layers=KINDS_OF_LAYERS.get(family, 2))


def fragments(engine: Engine) -> None:
    """Leave only single pages free, and no two of them beside each other."""
    page = engine.config.page_tokens
    names = [f"fragment {n}" for n in range(engine.kv.free_tokens // page)]
    for name in names:
        assert engine.kv.reserve(name, page) is None
    for name in names[::2]:
        engine.kv.free(name)


@pytest.mark.usefixtures("_small_trial")
@pytest.mark.parametrize("family", ["llama", pytest.param("mistral", marks=SLOW)])
def test_padded_steps_answer_the_same(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several prompts in a step, a prompt beside a decode, and decodes alone."""
    made_small(tmp_path, family)
    monkeypatch.setattr(cuda_graphs, "CHUNK_BUCKETS", (8, 12))  # interpreting takes its time
    plain, engine = engine_of(tmp_path, str(DEVICE)), engine_by_pages(tmp_path)
    graphs = with_graphs(engine)
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[3]]
    assert answers(engine, prompts, 2) == answers(plain, prompts, 2)
    for each in (plain, engine):
        for name in "ab":
            assert each.kv.reserve(name, 20) is None

    def drawn(*given: tuple[str, int, int]) -> None:
        items = [
            WorkItem(
                session=name, start=0, end=engine.spec.layers, position=first,
                token_ids=tuple(range(1, 1 + last - first)), sampling=Sampling(),
            )
            for name, first, last in given
        ]  # fmt: skip
        ids = [[result.token_id for result in each.step(items)] for each in (plain, engine)]
        assert ids[0] == ids[1]
        assert None not in ids[0]

    drawn(("a", 0, 9))
    drawn(("a", 9, 15), ("b", 0, 1))
    drawn(("a", 15, 16), ("b", 1, 2))
    sizes = sorted(key[2:] for key in graphs._graphs)
    assert sizes == [(2, 4096, False), (4, 4096, False), (8, 4096, True), (12, 4096, True)]


@pytest.mark.usefixtures("_small_trial")
def test_a_kernel_that_errs_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made_small(tmp_path, "llama")
    expected = answers(engine_of(tmp_path), PROMPTS[:2], 3)

    def skewed(*given: object) -> torch.Tensor:
        return attend_pages(*given) * 1.05  # type: ignore[arg-type]

    def nothing(query: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.full_like(query.transpose(1, 2), float("nan"))

    def one_head(*given: object) -> torch.Tensor:
        answer = attend_pages(*given)  # type: ignore[arg-type]
        answer[:, -1, -1] *= 1.05  # of the longest context, whose answer is the smallest
        return answer

    def fails(*_: object) -> torch.Tensor:
        raise RuntimeError("no C compiler\nand much more")

    for kernel, told in (
        (skewed, "off by 0.05"),
        (one_head, "off by 0.05"),
        (nothing, "off by nan"),
        (fails, "its kernel failed: no C compiler"),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            engine = engine_by_pages(tmp_path, kernel)
        assert not engine.reads_in_place
        assert [record.getMessage() for record in caplog.records if told in record.getMessage()]
        assert answers(engine, PROMPTS[:2], 3) == expected


@pytest.mark.usefixtures("_small_trial")
@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError])
def test_a_kernel_that_crashes_the_device_is_named(
    kind: type[RuntimeError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is told of it first; another load without kernels is what helps."""
    made_small(tmp_path, "llama")

    def gone(*_: object, **__: object) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def crashes(*_: object) -> torch.Tensor:
        monkeypatch.setattr(torch, "ones", gone)
        raise kind("Triton Error [CUDA]: an illegal memory access was encountered")

    with pytest.raises(MachineError, match="start again with --no-kernels"):
        engine_by_pages(tmp_path, crashes)


def test_windows_are_not_split_into_parts_without_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the contexts may be, as those of graphs."""
    tiles: list[int] = []

    def counted(programs: int, wanted: int, count: int) -> int:
        tiles.append(count)
        return 1

    monkeypatch.setattr(paged_attention, "splits_of", counted)
    for window in (17, 128, 0):
        compared(Shape(8, 2, 32, 32, window=window), ((1, 1000),), torch.float32)
    assert tiles == [0, 2, 15]


def test_tiles_and_splits() -> None:
    assert tile_tokens(16, 128, 128, 2, 227 << 10) == 64
    assert tile_tokens(64, 256, 256, 2, 99 << 10) == 16
    for programs in (1, 8, 100, 1000):
        splits = splits_of(programs, 528, tiles=64)
        assert splits <= 32
        assert splits == 1 or splits * programs <= 528 < 2 * splits * programs or splits == 32
    assert splits_of(1, 528, tiles=1) == 1
