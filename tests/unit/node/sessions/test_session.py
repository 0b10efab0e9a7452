"""Laws of one session at one stage."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dht.messages.session import FinishReason, RefusalCode, Sampling, SessionOpen
from dht.messages.types import RouteStage
from node.sessions.open_checks import StageView, refusal_of
from node.sessions.session import FEATURED_PROMPT_TOKENS, StageSession, StageState

LAYERS = 8


def rows(tokens: int) -> torch.Tensor:
    """Hidden states that only their number matters of."""
    return torch.empty(tokens, 0)


def make_open(hop: int = 0, stages: int = 2, prompt: int = 5, new: int = 4) -> SessionOpen:
    cuts = [round(LAYERS * i / stages) for i in range(stages + 1)]
    route = tuple(
        RouteStage(peer_id=f"p{i}", start=cuts[i], end=cuts[i + 1]) for i in range(stages)
    )
    return SessionOpen(
        session="s" * 16,
        attempt=0,
        client="client",
        fingerprint="f",
        route=route,
        hop=hop,
        prompt_tokens=prompt,
        max_new_tokens=new,
        sampling=Sampling(stop_token_ids=(99,)),
    )


def view(start: int = 0, end: int = 4, serving: bool = True) -> StageView:
    return StageView(
        fingerprint="f",
        layers=LAYERS,
        context_tokens=64,
        vocab=100,
        start=start,
        end=end,
        serving=serving,
    )


def active(open_: SessionOpen) -> StageSession:
    return StageSession(open=open_, state=StageState.ACTIVE)


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
    assert session.take_rows(0, rows(3)) is not None
    chunk = session.take_rows(3, rows(2))
    assert chunk is not None
    assert chunk.sampling is not None
    assert session.take_rows(3, rows(2)) is None, "repeated rows are dropped"
    assert session.take_rows(6, rows(1)) is None, "rows with a gap before them are dropped"


def test_rows_that_cross_the_prompts_end_are_dropped() -> None:
    session = active(make_open(hop=1, prompt=5))
    assert session.take_rows(0, rows(6)) is None
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
    ("open_", "me", "against", "code"),
    [
        (make_open(), "p0", view(), None),
        (make_open(hop=1), "p1", view(4, 8), None),
        (make_open(), "p0", view(0, 8), None),
        (make_open(), "other", view(), RefusalCode.BAD_REQUEST),
        (make_open(), "p0", view(end=3), RefusalCode.NOT_HELD),
        (make_open(), "p0", view(serving=False), RefusalCode.DRAINING),
        (make_open(prompt=60, new=5), "p0", view(), RefusalCode.TOO_LONG),
    ],
)
def test_refusals(
    open_: SessionOpen, me: str, against: StageView, code: RefusalCode | None
) -> None:
    refusal = refusal_of(open_, me, against)
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

    open_ = replace(make_open(), route=stages)
    refusal = refusal_of(open_, "p0", view())
    assert refusal is not None
    assert refusal[0] is RefusalCode.BAD_REQUEST


def test_a_ring_token_may_come_before_the_prompt() -> None:
    """A last stage that took over samples before the client has fed a new first stage."""
    session = active(make_open(prompt=5, new=4))
    assert session.add_inputs(5, (50,))
    assert session.next_chunk(64) is None
    assert not session.add_inputs(6, (60,)), "only the first token can be early"
    assert session.add_inputs(0, (0, 1, 2))
    assert session.add_inputs(3, (3, 4))
    assert session.inputs == [0, 1, 2, 3, 4, 50]
    assert session.add_inputs(6, (60,))


@given(
    prompt=st.integers(1, 30),
    answered=st.integers(0, 29),
    scores_from=st.integers(1, 30),
    cuts=st.lists(st.integers(1, 9), max_size=30),
)
def test_each_prompt_token_that_is_wanted_is_scored_once(
    prompt: int, answered: int, scores_from: int, cuts: list[int]
) -> None:
    answered = min(answered, prompt - 1)
    open_ = replace(
        make_open(hop=1, prompt=prompt),
        sampling=Sampling(prompt_logprobs=2),
        history=tuple(range(100, 100 + prompt)),
        answered=answered,
        scores_from=scores_from,
    )
    session = active(open_)
    scored = []
    for size in [*cuts, *[1] * prompt]:
        count = min(size, prompt - session.next_position)
        chunk = session.take_rows(session.next_position, rows(count)) if count else None
        if chunk is not None and chunk.targets is not None:
            assert chunk.targets.top == 2
            first = chunk.position + chunk.targets.first_row + 1
            ids = chunk.targets.token_ids
            assert chunk.targets.first_row + len(ids) <= chunk.tokens
            assert list(ids) == list(range(100 + first, 100 + first + len(ids)))
            scored += range(first, first + len(ids))
    assert scored == list(range(scores_from, prompt - answered))


@given(
    prompt=st.integers(1, 30),
    told=st.sampled_from(["all", "answer", "none"]),
    cuts=st.lists(st.integers(1, 9), max_size=30),
)
def test_an_own_head_is_told_what_is_known_of_the_prompt(
    prompt: int, told: str, cuts: list[int]
) -> None:
    ids = tuple(range(100, 100 + prompt))
    history = ids[prompt // 2 :] if told == "answer" else ()
    first = {"all": 0, "answer": prompt // 2, "none": prompt}[told]
    session = active(
        replace(
            make_open(hop=1, prompt=prompt),
            draft_tokens=4,
            prompt_ids=ids if told == "all" else (),
            history=history,
        )
    )
    for size in [*cuts, *[1] * prompt]:
        begin = session.next_position
        if not (count := min(size, prompt - begin)):
            break
        work = session.take_rows(begin, rows(count))
        assert work is not None
        assert work.foretells
        known = begin + 1 >= first
        assert work.following == (ids[begin + 1 : begin + count + 1] if known else ())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"answered": 5}, "5 tokens of answer in 5 of prompt"),
        ({"history": (1,)}, "1 token ids of history, 0 expected"),
        ({"prompt_ids": (1,)}, "1 token ids of a prompt of 5"),
        ({"prompt_ids": (1,) * 6}, "6 token ids of a prompt of 5"),
        ({"sampling": Sampling(repetition_penalty=2.0)}, "0 token ids of history, 5 expected"),
        ({"sampling": Sampling(presence_penalty=2.0), "answered": 2}, "history, 2 expected"),
        (
            {
                "prompt_tokens": 200_000,
                "answered": 100_000,
                "prompt_ids": (1,) * 200_000,
                "history": (1,) * 100_000,
                "sampling": Sampling(presence_penalty=2.0),
            },
            "300000 token ids in an open",
        ),
        (
            {
                "prompt_tokens": 60_000,
                "history": (1,) * 60_000,
                "sampling": Sampling(prompt_logprobs=20),
            },
            "49932 tokens at most",
        ),
    ],
)
@pytest.mark.parametrize("taken_over", [False, True])
def test_a_history_that_does_not_fit_is_refused(
    changed: dict[str, Any], said: str, taken_over: bool
) -> None:
    large = replace(view(), context_tokens=1 << 17)
    refusal = refusal_of(replace(make_open(), **changed), "p0", large, taken_over=taken_over)
    assert refusal is not None
    assert refusal[0] is RefusalCode.BAD_REQUEST
    assert said in refusal[1]


@given(
    prompt=st.integers(1, 400),
    layers=st.lists(st.integers(0, LAYERS - 1), min_size=1, max_size=3, unique=True).map(sorted),
    hop=st.integers(0, 2),
    cuts=st.lists(st.integers(1, 200), max_size=10),
)
def test_a_head_is_given_what_was_seen_of_the_newest_rows(
    prompt: int, layers: list[int], hop: int, cuts: list[int]
) -> None:
    open_ = replace(
        make_open(hop=hop, stages=3, prompt=prompt),
        draft_tokens=4,
        feature_layers=tuple(layers),
    )
    session = active(open_)
    stage = session.stage
    before = sum(layer < stage.start for layer in layers)
    here = tuple(layer for layer in layers if stage.start <= layer < stage.end)
    for size in [*cuts, *[200] * 3]:
        begin = session.next_position
        if not (count := min(size, prompt - begin)):
            break
        newest = begin + count - max(begin, prompt - FEATURED_PROMPT_TOKENS)
        if hop == 2 and not before:  # nothing travels
            newest = count
        vectors = torch.ones(max(0, newest) * before, 2)
        came = session.came(vectors, count)
        assert (came is not None) == (before > 0 < newest)
        work = session.take_rows(begin, rows(count), (), came)
        assert work is not None
        if newest < 1 or not (before or here):
            assert work.features is None
            continue
        assert work.features is not None
        assert work.features.rows == newest
        assert work.features.layers == here
        assert work.features.came is came
        if came is not None:
            assert came.shape == (newest, 2 * before)
            assert session._features(begin, begin + count, None) is None, "nothing came"


@pytest.mark.parametrize(
    ("changed", "layers"),
    [({"draft_tokens": 0}, (1, 2)), ({"migrate_until": 1}, (1, 2)), ({}, ())],
)
def test_a_session_without_drafts_or_on_its_way_takes_nothing_along(
    changed: dict[str, Any], layers: tuple[int, ...]
) -> None:
    open_ = replace(replace(make_open(hop=1), draft_tokens=4), **changed)
    session = active(replace(open_, feature_layers=layers) if layers else open_)
    came = session.came(torch.ones(4, 2), 2)
    work = session.take_rows(0, rows(2), (), came)
    assert work is not None
    assert work.features is None


@pytest.mark.parametrize(("vectors", "count"), [(0, 2), (3, 2), (6, 2), (1, 1)])
def test_other_vectors_than_rows_have_are_none(vectors: int, count: int) -> None:
    open_ = replace(make_open(hop=1), draft_tokens=4, feature_layers=(1, 2, 5))
    assert active(open_).came(torch.ones(vectors, 2), count) is None


@pytest.mark.parametrize("layers", [(2, 1), (1, 1), (7, 8), (9,)])
def test_a_head_looks_in_front_of_layers_that_ascend_and_are_there(layers: tuple[int, ...]) -> None:
    open_ = replace(make_open(), feature_layers=layers)
    refusal = refusal_of(open_, "p0", view())
    assert refusal is not None
    assert refusal[0] is RefusalCode.BAD_REQUEST
    assert refusal[1] == f"hidden states in front of layers {list(layers)} of 8 asked"
    assert refusal_of(replace(open_, feature_layers=(0, 1, 7)), "p0", view()) is None
