"""Laws of one session at one stage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.messages import FinishReason, RefusalCode, Sampling, SessionOpen
from dht.types import RouteStage
from node.stage_session import StageSession, StageState, StageView, refusal_of

LAYERS = 8


def make_open(hop: int = 0, stages: int = 2, prompt: int = 5, new: int = 4) -> SessionOpen:
    cuts = [round(LAYERS * i / stages) for i in range(stages + 1)]
    route = tuple(
        RouteStage(peer_id=f"p{i}", start=cuts[i], end=cuts[i + 1]) for i in range(stages)
    )
    return SessionOpen(
        session="s" * 16,
        epoch=0,
        client="client",
        fingerprint="f",
        route=route,
        addresses=((),) * stages,
        hop=hop,
        prompt_tokens=prompt,
        max_new_tokens=new,
        sampling=Sampling(stop_token_ids=(99,)),
    )


def view(peer: str = "p0", start: int = 0, end: int = 4, serving: bool = True) -> StageView:
    return StageView(
        peer_id=peer,
        fingerprint="f",
        layers=LAYERS,
        context_tokens=64,
        start=start,
        end=end,
        serving=serving,
    )


def active(open_: SessionOpen) -> StageSession:
    return StageSession(open=open_, state=StageState.ACTIVE)


@pytest.mark.property
@given(
    prompt=st.integers(1, 50),
    new=st.integers(1, 20),
    chunk=st.integers(1, 17),
    cuts=st.lists(st.integers(1, 9), max_size=20),
)
def test_chunks_cover_every_input_once_and_never_cross_the_prompts_end(
    prompt: int, new: int, chunk: int, cuts: list[int]
) -> None:
    session = active(make_open(prompt=prompt, new=new))
    ids = list(range(prompt + new - 1))
    given_, ran = 0, []
    while len(ran) < len(ids):
        size = cuts.pop() if cuts else 1
        part = tuple(ids[given_ : given_ + size])
        if part:
            assert session.add_inputs(given_, part)
            given_ += len(part)
        while (piece := session.next_chunk(chunk)) is not None:
            assert piece.position == len(ran)
            assert piece.tokens == len(piece.token_ids or ()) <= chunk
            assert not piece.position < prompt < piece.position + piece.tokens
            assert session.next_chunk(chunk) is None, "one chunk at a time"
            ran.extend(piece.token_ids or ())
            session.in_flight = False
    assert ran == ids
    assert not session.add_inputs(len(ids), (1,)), "more than was reserved"


def test_the_last_stage_samples_only_behind_the_prompt() -> None:
    session = active(make_open(hop=1, prompt=5))
    assert session.take_rows(0, 3) is not None
    chunk = session.take_rows(3, 2)
    assert chunk is not None
    assert chunk.sample
    assert session.take_rows(3, 2) is None, "repeated rows are dropped"
    assert session.take_rows(6, 1) is None, "rows with a gap before them are dropped"


def test_rows_that_cross_the_prompts_end_are_dropped() -> None:
    session = active(make_open(hop=1, prompt=5))
    assert session.take_rows(0, 6) is None
    assert session.next_position == 0


def test_an_answer_ends_at_a_stop_token_or_at_its_length() -> None:
    session = active(make_open(hop=1, new=2))
    assert session.add_sampled(7) == 5
    assert session.finish_reason is None
    assert session.add_sampled(8) == 6
    assert session.finish_reason is FinishReason.LENGTH
    stopped = active(make_open(hop=1))
    stopped.add_sampled(99)
    assert stopped.finish_reason is FinishReason.STOP
    assert session.sampled_from(6) == (8,)
    assert session.sampled_from(0) == (7, 8)


def test_roles_on_a_route() -> None:
    first, last = StageSession(open=make_open(0)), StageSession(open=make_open(1))
    assert (first.previous_peer, first.next_peer, first.ring_peer) == ("client", "p1", None)
    assert (last.previous_peer, last.next_peer, last.ring_peer) == ("p0", None, "p0")
    alone = StageSession(open=make_open(0, stages=1))
    assert (alone.next_peer, alone.ring_peer) == (None, None)


@pytest.mark.parametrize(
    ("open_", "against", "code"),
    [
        (make_open(), view(), None),
        (make_open(hop=1), view("p1", 4, 8), None),
        (make_open(), view("p0", 0, 8), None),
        (make_open(), view("other"), RefusalCode.BAD_REQUEST),
        (make_open(), view(end=3), RefusalCode.NOT_HELD),
        (make_open(), view(serving=False), RefusalCode.DRAINING),
        (make_open(prompt=60, new=5), view(), RefusalCode.TOO_LONG),
    ],
)
def test_refusals(open_: SessionOpen, against: StageView, code: RefusalCode | None) -> None:
    refusal = refusal_of(open_, against)
    assert (refusal[0] if refusal else None) == code


@pytest.mark.parametrize(
    "route",
    [
        (("p0", 0, 4), ("p1", 5, 8)),
        (("p0", 0, 4), ("p1", 3, 8)),
        (("p0", 0, 4), ("p1", 4, 7)),
        (("p0", 1, 4), ("p1", 4, 8)),
        (("p0", 0, 4), ("p1", 4, 6), ("p0", 6, 8)),
        (("p0", 0, 4), ("p1", 4, 4), ("p2", 4, 8)),
    ],
)
def test_a_malformed_route_is_refused(route: tuple[tuple[str, int, int], ...]) -> None:
    stages = tuple(RouteStage(peer_id=p, start=s, end=e) for p, s, e in route)
    from dataclasses import replace

    open_ = replace(make_open(), route=stages, addresses=((),) * len(stages))
    refusal = refusal_of(open_, view())
    assert refusal is not None
    assert refusal[0] is RefusalCode.BAD_REQUEST
