"""Rows that carry more than hidden states: exact, of one width, and checked where they come in."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dht.messages.session import Sampling
from node.engine.engine import Engine, EngineConfig, WorkItem, WorkResult
from node.kv.layer_pool import KvShape
from node.model.carried import (
    INTEGERS_MAX,
    Carried,
    Chosen,
    Passed,
    Shared,
    TokenForm,
    UnsoundRows,
    digits,
    integers,
)
from node.weights.store import WeightStore
from testing.tiny_families import make

WIDTH, TOKENS, MOST = 6, 3, 4
KV = KvShape(2, 3, 5)
CARRIED = Carried(
    hidden=TokenForm(shape=(2, 1, 3), dim=2),
    inputs=((), ((0, TokenForm(shape=(1, 4), dim=1)),), ()),
    chosen=(None, Chosen(argument="chosen", most=MOST), None),
    shared=(None, Shared(key="full", source=0, kv=KV), Shared(key="full", source=0, kv=KV)),
)


@pytest.mark.property
@given(st.lists(st.integers(-1, INTEGERS_MAX), min_size=1, max_size=9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_integers_are_exact_in_any_dtype_of_rows(dtype: torch.dtype, numbers: list[int]) -> None:
    rows = digits(torch.tensor([numbers])).to(dtype)
    assert integers(rows)[0].tolist() == numbers


@pytest.mark.parametrize("number", [-2, INTEGERS_MAX + 1])
def test_integers_that_are_too_large_do_not_leave(number: int) -> None:
    with pytest.raises(UnsoundRows):
        digits(torch.tensor([[number]]))


def passed() -> Passed:
    return Passed(
        hidden=torch.randn(2, 1, TOKENS, 3),
        inputs={(1, 0): torch.randn(1, TOKENS, 4)},
        chosen=torch.tensor([[[5, 2], [0, 7], [3, 1]]]),
        shared={"full": (torch.randn(1, 2, TOKENS, 3), torch.randn(1, 2, TOKENS, 5))},
    )


def test_what_layers_behind_a_boundary_need_comes_back() -> None:
    assert CARRIED.width == WIDTH + 4 + 3 * MOST + KV.numbers
    for boundary in range(4):
        given = passed()
        rows = CARRIED.pack(boundary, given, 6)
        assert rows.shape == (TOKENS, CARRIED.width)
        back = CARRIED.unpack(boundary, rows)
        assert torch.equal(back.hidden, given.hidden)
        assert back.inputs.keys() == (given.inputs.keys() if boundary < 2 else set())
        for key, value in back.inputs.items():
            assert torch.equal(value, given.inputs[key])
        assert back.shared.keys() == ({"full"} if boundary in (1, 2) else set())
        for key, pair in back.shared.items():
            assert all(map(torch.equal, pair, given.shared[key]))
        if boundary == 1:
            assert back.chosen is not None
            assert given.chosen is not None
            assert [set(row) for row in back.chosen[0].tolist()] == [
                set(row) for row in given.chosen[0].tolist()
            ]


def test_tokens_behind_a_row_do_not_travel() -> None:
    rows = CARRIED.pack(1, passed(), 4)  # the rows at 4, 5 and 6
    chosen = CARRIED.unpack(1, rows).chosen
    assert chosen is not None
    assert [set(row) for row in chosen[0].tolist()] == [{2}, {0}, {3, 1}]


def test_rows_that_choose_tokens_outside_the_context_are_refused() -> None:
    rows = CARRIED.pack(1, passed(), 6)
    assert CARRIED.refusal(1, rows, 9) is None
    assert "not among" in str(CARRIED.refusal(1, rows, 8)), "a token behind its row"
    first = WIDTH + 4
    for number in (0.5, -1.0, 256.0, 1e30):
        bad = rows.clone()
        bad[1, first] = number
        assert "digits" in str(CARRIED.refusal(1, bad, 9))
    none = rows.clone()
    none[:, first : first + 3 * MOST] = 0
    assert "not among" in str(CARRIED.refusal(1, none, 9)), "a row that chose none"
    huge = rows.clone()
    huge[:, first : first + 3] = 255
    assert "not among" in str(CARRIED.refusal(1, huge, 9))
    assert CARRIED.refusal(2, huge, 9) is None, "nothing was chosen for layer 2"


def test_trial_rows_are_sound_at_each_boundary() -> None:
    for boundary in range(4):
        rows = CARRIED.trial(boundary, torch.randn(TOKENS, CARRIED.width))
        assert CARRIED.refusal(boundary, rows, TOKENS) is None


def test_a_peer_that_sends_tokens_nobody_chose_fails_its_own_session_alone(tmp_path: Path) -> None:
    make(tmp_path, "glm_moe_dsa, chosen before")
    store = WeightStore.open(str(tmp_path))
    engine = Engine(EngineConfig(store=store, name="tiny", memory_bytes=16 << 20))
    engine.load(1, 4)
    structure = engine.layout.structure
    sound = structure.trial_rows(1, torch.randn(2, structure.row_width))
    far = sound.clone()
    far[1, structure.width : structure.width + 3] = 9
    torn = sound.clone()
    torn[0, structure.width] = 0.25

    def results(**rows: torch.Tensor) -> dict[str, WorkResult]:
        items = [
            WorkItem(session=name, start=1, end=4, position=0, hidden=hidden, sampling=Sampling())
            for name, hidden in rows.items()
        ]
        for item in items:
            engine.kv.free(item.session)
            assert engine.kv.reserve(item.session, 8) is None
        return dict(zip(rows, engine.step(items), strict=True))

    alone = results(sound=sound)["sound"]
    assert alone.error is None
    mixed = results(sound=sound, far=far, torn=torn, narrow=sound[:, :-1])
    assert mixed["sound"].token_id == alone.token_id
    assert "not among" in str(mixed["far"].error)
    assert "digits" in str(mixed["torn"].error)
    assert "shape" in str(mixed["narrow"].error)
    told = {name: result.unsound_input for name, result in mixed.items()}
    assert told == {"sound": False, "far": True, "torn": True, "narrow": False}
