"""KV that moves between engines, and KV that sessions share."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from dht.messages.session import Sampling
from node.engine.engine import Engine, KvRows, WorkItem
from node.kv.export import KvBytes, pack_kv
from testing.random_model import make_llama
from tests.unit.node.engines import loaded
from tests.unit.node.kv.accounts import check_pool

LAYERS, VOCAB, WIDTH = 3, 61, 64
PROMPT = tuple(n * 11 % VOCAB for n in range(1, 54))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("transfer")
    return make_llama(where, hidden=WIDTH, layers=LAYERS, vocab=VOCAB, context_tokens=256)


engine_of = partial(loaded, memory_bytes=16 << 20)


def run(engine: Engine, session: str, position: int, ids: tuple[int, ...]) -> int:
    item = WorkItem(
        session=session, start=0, end=LAYERS, position=position, token_ids=ids, sampling=Sampling()
    )
    result = engine.step([item])[0]
    assert result.error is None, result.error
    assert result.token_id is not None
    return result.token_id


def answer(engine: Engine, session: str, new: int, at: int, token: int) -> list[int]:
    """``new`` tokens behind ``token``, which stands at ``at``."""
    tokens = [token]
    for position in range(at, at + new):
        tokens.append(run(engine, session, position, (tokens[-1],)))
    return tokens[1:]


def test_decoding_goes_on_elsewhere_as_if_nothing_had_happened(directory: Path) -> None:
    here, there, alone = (engine_of(directory) for _ in range(3))
    for engine in (here, there, alone):
        assert engine.kv.reserve("other", 40) is None  # pages differ between the engines
        assert engine.kv.reserve("s", 128) is None
    there.kv.free("other")
    first = run(here, "s", 0, PROMPT)
    expected = answer(alone, "s", 20, len(PROMPT), run(alone, "s", 0, PROMPT))
    copied = 0
    tokens = [first]
    while copied < len(PROMPT):  # in chunks of any size, while it goes on decoding
        rows = here.kv.take("s", copied, 13)
        tokens += answer(here, "s", 1, len(PROMPT) + len(tokens) - 1, tokens[-1])
        assert there.kv.put("s", rows) is None
        copied += rows.tokens
    written = len(PROMPT) + len(tokens) - 1
    assert there.kv.put("s", here.kv.take("s", copied, 10_000)) is None
    here.kv.free("s")
    tokens += answer(there, "s", 20 - len(tokens) + 1, written, tokens[-1])
    assert tokens[1:] == expected
    there.kv.free("s")
    for engine in (here, there):
        check_pool(engine.kv)
    assert there.kv.free_tokens == engine_of(directory).kv.free_tokens


def test_only_the_layers_of_the_session_travel(directory: Path) -> None:
    engine = engine_of(directory)
    engine.kv.reserve("s", 20)
    item = WorkItem(session="s", start=1, end=2, position=0, hidden=torch.ones(5, WIDTH))
    assert engine.step([item])[0].error is None
    rows = engine.kv.take("s", 2, 100)
    assert (rows.start, rows.end, rows.position, rows.tokens) == (1, 2, 2, 3)
    assert [len(parts) for parts in rows.layers] == [2]


def test_what_cannot_be_exported_raises(directory: Path) -> None:
    engine = engine_of(directory)
    with pytest.raises(KeyError):
        engine.kv.take("nobody", 0, 1)
    engine.kv.reserve("s", 20)
    with pytest.raises(ValueError, match="0 are written"):
        engine.kv.take("s", 0, 1)
    run(engine, "s", 0, (1, 2))
    with pytest.raises(ValueError, match="2 are written"):
        engine.kv.take("s", 2, 1)


def test_rows_that_do_not_fit_are_refused_and_nothing_changes(directory: Path) -> None:
    here, there = engine_of(directory), engine_of(directory)
    here.kv.reserve("s", 20)
    there.kv.reserve("s", 18)
    first = run(here, "s", 0, PROMPT[:18])
    good = here.kv.take("s", 0, 18)

    def but(change: Callable[[int, torch.Tensor], torch.Tensor]) -> KvRows:
        """The rows with another number ``at`` each of a layer's parts: keys, then values."""
        parts = (tuple(change(at, part) for at, part in enumerate(kept)) for kept in good.layers)
        return replace(good, layers=tuple(parts))

    nan = but(lambda at, part: part.clone())
    nan.layers[1][0][3, 0, 0] = torch.nan
    long = but(lambda at, part: torch.zeros(19, *part.shape[1:]))
    bad = {
        "not all held": replace(good, end=LAYERS + 1),
        "2 layers": replace(good, layers=good.layers[:2]),
        "3 parts": replace(good, layers=tuple((*kept, kept[0]) for kept in good.layers)),
        "shape": but(lambda at, part: part[:, :, at:]),
        "float16": but(lambda at, part: part if at else part.half()),
        "not finite": nan,
        "0 comes next": replace(good, position=1),
        "18 reserved": long,
        "no tokens": replace(good, layers=(), end=0),
    }
    for told, rows in bad.items():
        reason = there.kv.put("s", rows)
        assert reason is not None, told
        assert told in reason or "not all held" in reason
    assert "no KV" in str(there.kv.put("nobody", good))
    assert there.kv.put("s", good) is None
    assert there.kv.put("s", good) == "KV from 0 on came, 18 comes next"
    here.kv.reserve("again", 20)
    assert run(here, "again", 0, PROMPT[:18]) == first
    check_pool(there.kv)


def test_an_engine_that_gave_its_memory_back_answers_as_before_when_it_loads_again(
    directory: Path,
) -> None:
    engine = engine_of(directory)
    assert engine.kv.reserve("s", 64) is None
    first = run(engine, "s", 0, PROMPT)
    engine.kv.free("s")
    held = [weakref.ref(pool.keys) for pool in engine._pools.values()]
    held += [weakref.ref(w) for m in engine.loaded.layers.values() for w in m.parameters()]
    assert len(held) > LAYERS
    engine.unload()
    assert not [tensor for tensor in held if tensor() is not None], "memory is still in use"
    assert engine.kv.free_tokens == 0
    assert engine.kv.reserve("s", 64) is not None
    engine.load(0, LAYERS)
    assert engine.kv.reserve("s", 64) is None
    assert run(engine, "s", 0, PROMPT) == first


def test_kv_travels_as_bytes_and_only_what_fits_is_taken(directory: Path) -> None:
    here, there = (engine_of(directory) for _ in range(2))
    for engine in (here, there):
        assert engine.kv.reserve("s", 128) is None
    first = run(here, "s", 0, PROMPT)
    expected = answer(here, "s", 5, len(PROMPT), first)
    body = pack_kv(here.kv.take("s", 0, len(PROMPT)))
    packed = KvBytes(start=0, end=LAYERS, position=0, tokens=len(PROMPT), body=body)
    for wrong in (
        replace(packed, body=body[:-1]),
        replace(packed, body=body + b"\0"),
        replace(packed, tokens=1 << 15),
        replace(packed, tokens=0),
        replace(packed, end=LAYERS + 1),
        replace(packed, position=1),
        replace(packed, body=b"\xff" * len(body)),
    ):
        assert there.kv.put("s", wrong) is not None
    assert there.kv.put("s", packed) is None
    assert answer(there, "s", 5, len(PROMPT), first) == expected


def test_sessions_on_disjoint_layers_have_the_same_pages_and_answer_as_one_on_all(
    directory: Path,
) -> None:
    """KV is taken as tokens come; page p of either session is page p of its own layers alone."""
    engine, alone = engine_of(directory), engine_of(directory)
    cut = 1
    spans = {"low": (0, cut), "high": (cut, LAYERS)}
    for name, span in spans.items():
        engine.kv.open(name, 100, span, 40)

    def through(position: int, ids: tuple[int, ...]) -> int:
        """Run both sessions one behind the other, as two stages would."""
        for name in spans:
            assert engine.kv.extend(name, position + len(ids))
        low = WorkItem(session="low", start=0, end=cut, position=position, token_ids=ids)
        (ran,) = engine.step([low])
        assert ran.error is None
        high = WorkItem(
            session="high",
            start=cut,
            end=LAYERS,
            position=position,
            hidden=ran.hidden,
            sampling=Sampling(),
        )
        (ran,) = engine.step([high])
        assert ran.error is None
        assert ran.token_id is not None
        return ran.token_id

    alone.kv.reserve("s", 100)
    token, expected = through(0, PROMPT), run(alone, "s", 0, PROMPT)
    for position in range(len(PROMPT), len(PROMPT) + 20):
        assert token == expected
        token, expected = through(position, (token,)), run(alone, "s", position, (expected,))
    low, high = (engine.kv.get(name) for name in spans)
    assert low is not None
    assert high is not None
    assert low.pages == high.pages
    refused = WorkItem(session="low", start=0, end=LAYERS, position=74, token_ids=(1,))
    (told,) = engine.step([refused])
    assert told.error == "layers [0, 3) asked, the session has KV on layers [0, 1]"
    beyond = WorkItem(session="low", start=0, end=cut, position=73, token_ids=(1,) * 9)
    (told,) = engine.step([beyond])
    assert told.error == "positions [73, 82) asked, 80 reserved"
