"""The living rules on paper: cases computed by hand, and laws that hold for every swarm."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.commands.full_load import (
    OnlineConfig,
    Rules,
    as_plan,
    build_simulation,
    offline,
    online,
)
from coordinator.policies.batching.scheduler import BatchLimits
from coordinator.simulator.core.parts import SimulatedSession
from coordinator.simulator.core.profiles import interpolated
from coordinator.simulator.core.swarm import LiveSwarm
from coordinator.simulator.core.trace import Request, typical
from coordinator.simulator.links.closed_form_wire import FramedWire, InOrderWire
from coordinator.simulator.links.scheduled_wire import ScheduledWire
from coordinator.simulator.runs.runs import Arrivals
from dht.errors import UserError
from dht.messages.types import SharedUplink
from tests.examples import examples
from tests.unit.coordinator.simulator.toy import (
    BYTES_PER_S,
    DECODE_S,
    ID_BYTES,
    LATENCY_S,
    PREFILL_S,
    REQUESTS,
    STATE_BYTES,
    Recorder,
    poisson,
    profile,
    request,
    saturated,
    start,
    swarm,
)

WIRES = [FramedWire, InOrderWire, ScheduledWire]
ROW_BYTES = 8192
TOKEN_S = LATENCY_S + ID_BYTES / BYTES_PER_S
"""Time of one token id on an idle link."""


def row_s(tokens: int) -> float:
    """Time of a frame of rows on an idle link."""
    return LATENCY_S + tokens * STATE_BYTES / BYTES_PER_S


@pytest.mark.parametrize("wire", WIRES)
def test_zero_load_is_the_sum_of_the_parts(wire: type) -> None:
    engine = LiveSwarm(*swarm([(0, 3), (3, 5)]), wire, chunk_tokens=None)
    seen = Recorder()
    number = start(engine, 1.0, request(100, 3), [("p0", 0, 3), ("p1", 3, 5)])
    engine.run(1e3, seen)
    prompt = LATENCY_S + 100 * ID_BYTES / BYTES_PER_S + 5 * 100 * PREFILL_S + row_s(100)
    # The ring closes without the client: the last stage's token goes to the first stage.
    turn = 5 * DECODE_S + row_s(1) + TOKEN_S
    sampled = 1.0 + prompt
    assert seen.prompts[number] == pytest.approx(sampled + TOKEN_S, rel=1e-4)
    expected = [sampled + turn, sampled + 2 * turn, sampled + 3 * turn]
    assert seen.tokens[number] == pytest.approx(expected, rel=1e-4)
    assert not any(peer.sessions for peer in engine.peers.values())


def test_over_the_clients_host_the_ring_is_longer_by_a_link() -> None:
    engine = LiveSwarm(*swarm([(0, 3), (3, 5)]), FramedWire, chunk_tokens=None, hub=True)
    seen = Recorder()
    number = start(engine, 0.0, request(10, 2), [("p0", 0, 3), ("p1", 3, 5)])
    engine.run(1e3, seen)
    first, second = seen.tokens[number]
    assert second - first == pytest.approx(5 * DECODE_S + row_s(1) + 2 * TOKEN_S)


def test_one_stage_alone_needs_no_ring() -> None:
    engine = LiveSwarm(*swarm([(0, 4)]), FramedWire)
    seen = Recorder()
    number = start(engine, 0.0, request(10, 3), [("p0", 0, 4)])
    engine.run(1e3, seen)
    times = seen.tokens[number]
    assert [b - a for a, b in itertools.pairwise(times)] == pytest.approx([4 * DECODE_S] * 2)


def test_a_decode_overtakes_a_prompt_on_a_link_and_not_in_order() -> None:
    waits = {}
    for wire in WIRES:
        engine = LiveSwarm(*swarm([(0, 1), (1, 2)]), wire, chunk_tokens=None)
        seen = Recorder()
        route = [("p0", 0, 1), ("p1", 1, 2)]
        small = start(engine, 0.0, request(1, 30), route)
        start(engine, 3.0, request(1000, 1), route)
        engine.run(1e3, seen)
        times = seen.tokens[small]
        waits[wire] = max(b - a for a, b in itertools.pairwise(times))
    # The prompt's rows take 10 s on the link between the stages, a slice of them 4 s at most.
    assert waits[FramedWire] < 7.0
    assert waits[ScheduledWire] < 7.0
    assert waits[InOrderWire] > 10.0


def test_decodes_of_a_step_for_one_peer_share_a_frame() -> None:
    problem, profiles, held = swarm([(0, 10), (10, 12)])
    engine = LiveSwarm(problem, profiles, held, FramedWire)
    seen = Recorder()
    for number in range(6):
        session = SimulatedSession(number, request(1, 8), 0.0)
        engine.place(session, [("p0", 0, 10), ("p1", 10, 12)])
        engine.enter(session)
    engine.run(1e3, seen)
    assert {len(times) for times in seen.tokens.values()} == {8}
    # The tokens enter 2 ms apart and a step takes 20 ms: the first runs alone, then five together.
    assert engine.links["p0", "p1"].pieces == 2 * 8


def test_sessions_that_enter_in_the_middle_share_the_layers_that_they_run() -> None:
    problem, profiles, held = swarm([(0, 2), (0, 6)])
    engine = LiveSwarm(problem, profiles, held, FramedWire)
    # One decode over all six layers and one over the last four, in one step.
    peer = engine.peers["p1"]
    sessions = [SimulatedSession(n, request(10, 2), 0.0) for n in range(2)]
    engine.place(sessions[0], [("p1", 0, 6)])
    engine.place(sessions[1], [("p0", 0, 2), ("p1", 2, 6)])
    pieces = [session.decode for session in sessions]
    for session, piece in zip(sessions, pieces, strict=True):
        piece.hop = session.hops[-1]
    assert engine._step_s(peer, pieces) == pytest.approx(6 * DECODE_S)
    pieces[1].prefill, pieces[1].tokens = True, 5
    assert engine._step_s(peer, pieces) == pytest.approx(
        2 * DECODE_S + 4 * (DECODE_S + 5 * PREFILL_S)
    )


def test_a_session_in_the_middle_of_its_answer_goes_on_from_there() -> None:
    engine = LiveSwarm(*swarm([(0, 3), (3, 5)]), FramedWire)
    seen = Recorder()
    session = SimulatedSession(7, request(50, 10), 0.0)
    session.left_tokens, session.tokens_in_kv = 4, 56
    engine.place(session, [("p0", 0, 3), ("p1", 3, 5)])
    engine.at(1.0, engine.enter, session)
    engine.run(1e3, seen)
    assert len(seen.tokens[7]) == 4
    assert not seen.prompts
    assert seen.tokens[7][0] == pytest.approx(1.0 + TOKEN_S + 5 * DECODE_S + row_s(1))
    assert session.tokens_in_kv == 60


def test_the_context_makes_layers_slower_where_that_was_measured() -> None:
    slow = replace(profile(), decode_context=((0, 1e-5), (100, 1e-5)))
    engine = LiveSwarm(*swarm([(0, 4)], [slow]), FramedWire)
    session = SimulatedSession(0, request(300, 2), 0.0)
    session.tokens_in_kv = 300
    engine.place(session, [("p0", 0, 4)])
    session.decode.hop = session.entry
    assert engine._step_s(engine.peers["p0"], [session.decode]) == pytest.approx(
        4 * (DECODE_S + 300 * 1e-5)
    )


def test_prefill_beside_decodes_is_bounded_as_in_a_stage() -> None:
    engine = LiveSwarm(*swarm([(0, 4)]), FramedWire, chunk_tokens=40)
    peer = engine.peers["p0"]
    # 4 layers at 1 ms a token: 25 rows take the 0.1 s that a decode may wait.
    assert peer.scheduler._limits == BatchLimits(prefill_tokens_max=25)
    seen = Recorder()
    for _ in range(3):
        start(engine, 0.0, request(40, 2), [("p0", 0, 4)])
    engine.run(1e3, seen)
    assert {len(times) for times in seen.tokens.values()} == {2}
    # Chunks longer than the bound run one in a step.
    prompts = sorted(seen.prompts.values())
    assert prompts[1] - prompts[0] >= 40 * 4 * PREFILL_S - 1e-9


@pytest.mark.parametrize("wire", [FramedWire, ScheduledWire])
def test_links_of_one_uplink_share_its_rate(wire: type) -> None:
    problem, profiles, held = swarm([(0, 1), (1, 2), (1, 2)])
    ends = {}
    for own in (1, 100, math.inf):
        uplink = replace(profile(), out_bytes_per_s=own * BYTES_PER_S)
        peers = {**profiles.peers, "p0": uplink}
        engine = LiveSwarm(problem, replace(profiles, peers=peers), held, wire, chunk_tokens=None)
        seen = Recorder()
        for last in ("p1", "p2"):
            start(engine, 0.0, request(100, 1), [("p0", 0, 1), (last, 1, 2)])
        engine.run(1e3, seen)
        ends[own] = max(seen.prompts.values())
    # Each prompt's rows take a second on its link: behind each other over an uplink no wider than
    # that, beside each other over a wide one.
    assert ends[1] - ends[math.inf] == pytest.approx(1.0, abs=0.11)
    assert ends[100] - ends[math.inf] == pytest.approx(0.0, abs=0.11)


@pytest.mark.parametrize("wire", [FramedWire, ScheduledWire])
@pytest.mark.parametrize("way", ["up", "down"])
def test_peers_behind_one_connection_share_its_rate(wire: type, way: str) -> None:
    """Two prompts, each from a peer of its own to another: behind each other where both senders, or
    both receivers, are in one home, and untouched where each pair is."""
    spans = [(0, 1), (0, 1), (1, 2), (1, 2)]

    def last_s(homes: str) -> float:
        problem, profiles, held = swarm(spans)
        named = zip(problem.nodes, homes.split(), strict=True)
        nodes = (replace(node, uplink=name) for node, name in named)
        uplinks = tuple(
            SharedUplink(name=name, **{f"{way}_bytes_per_s": BYTES_PER_S})  # type: ignore[arg-type]
            for name in "hg"
        )
        shared = replace(problem, nodes=tuple(nodes), uplinks=uplinks)
        engine = LiveSwarm(shared, profiles, held, wire, chunk_tokens=None)
        seen = Recorder()
        for first, last in (("p0", "p2"), ("p1", "p3")):
            start(engine, 0.0, request(100, 1), [(first, 0, 1), (last, 1, 2)])
        engine.run(1e3, seen)
        return max(seen.prompts.values())

    together = "h h a b" if way == "up" else "a b h h"
    apart = last_s("a b c d")
    assert last_s(together) - apart == pytest.approx(1.0, abs=0.11)
    assert last_s("h g h g") == pytest.approx(apart), "links within a home do not pass it"


@given(
    cut=st.integers(1, 5),
    requests=REQUESTS,
    wire=st.sampled_from(WIRES),
    chunk_tokens=st.sampled_from([None, 0, 7]),
    hub=st.booleans(),
)
@examples(60)
def test_every_request_ends_and_no_token_comes_early(
    cut: int,
    requests: list[tuple[float, int, int, bool]],
    wire: type,
    chunk_tokens: int | None,
    hub: bool,
) -> None:
    engine = LiveSwarm(
        *swarm([(0, cut), (cut, 6), (0, 6)]), wire, chunk_tokens=chunk_tokens, hub=hub
    )
    seen = Recorder()
    opened: dict[int, tuple[float, Request, bool]] = {}
    for at_s, input_tokens, output_tokens, alone in requests:
        what = request(input_tokens, output_tokens)
        # Alone on p2, or by p0 into p2's middle: both share p2's steps.
        route = [("p2", 0, 6)] if alone else [("p0", 0, cut), ("p2", cut, 6)]
        opened[start(engine, at_s, what, route)] = at_s, what, alone
    engine.run(1e9, seen)
    assert set(seen.done) == set(opened)
    for number, (at_s, what, alone) in opened.items():
        tokens = seen.tokens[number]
        assert len(tokens) == what.output_tokens
        links = 0.0 if alone else row_s(1)
        ring = 2 * TOKEN_S if hub else 0.0 if alone else TOKEN_S
        earliest = at_s + LATENCY_S + 6 * what.input_tokens * PREFILL_S / 2 + links
        assert seen.prompts[number] >= earliest - 1e-6
        for before, after in itertools.pairwise(tokens):
            assert after - before >= 6 * DECODE_S + links + ring - 1e-5
    # Conservation: each peer ran each token of each route over it exactly once.
    through = {"p0": 0, "p2": 0}
    for _, what, alone in opened.values():
        for name in ["p2"] if alone else ["p0", "p2"]:
            through[name] += what.input_tokens + what.output_tokens
    assert {name: engine.peers[name].tokens for name in through} == through
    assert not any(peer.sessions or len(peer.scheduler) for peer in engine.peers.values())
    assert not any(link.wire.queued_bytes for link in engine.links.values())


@given(
    points=st.lists(
        st.tuples(st.integers(0, 60), st.floats(0, 10)), min_size=2, unique_by=lambda p: p[0]
    )
)
def test_tables_meet_their_points(points: list[tuple[int, float]]) -> None:
    points.sort()
    table = interpolated(tuple(points), 60)
    for tokens, seconds in points:
        assert table[tokens] == pytest.approx(seconds, abs=1e-9)
    assert all(value >= 0 for value in table)


def test_the_same_seed_gives_the_same_report_and_another_does_not() -> None:
    problem, profiles, held, config = saturated()
    first = offline(problem, profiles, held, typical(), config)
    assert offline(problem, profiles, held, typical(), config) == first
    other = saturated(seed=4)[3]
    assert offline(problem, profiles, held, typical(), other) != first


def test_full_load_fills_the_peers_and_never_their_kv() -> None:
    problem, profiles, held, config = saturated()
    report = offline(problem, profiles, held, typical(), config)
    assert report.decode_tokens_per_s > 0
    assert max(use.busy for use in report.peers.values()) > 0.7
    assert all(use.kv_peak <= 1 for use in report.peers.values())
    # Little's law for decodes: at most one per session is under way, and the room bounds sessions.
    under_way = report.decode_tokens_per_s * report.decode.mean_s
    assert under_way <= 400_000 / (4 * 244)
    assert report.decode.count == round(report.decode_tokens_per_s * report.measured_s)


@pytest.mark.parametrize(
    "rules", [Rules(links=links) for links in ("in-order", "framed", "anabranch")]
)
def test_all_that_arrives_is_served_by_all_rules(rules: Rules) -> None:
    problem, profiles, held, _ = saturated()
    arrivals = poisson(typical(), per_s=1.0, duration_s=20.0, seed=5)
    config = OnlineConfig(measured_s=20.0, rules=rules)
    report = online(problem, profiles, held, arrivals, config)
    assert report.sessions_done == report.sessions_opened == len(arrivals)
    assert all(use.kv_peak <= 1 for use in report.peers.values())


@pytest.mark.parametrize("wrong", [{"links": "best"}, {"scheduler": "best"}])
def test_rules_that_there_are_not_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(UserError):
        Rules(**wrong)  # type: ignore[arg-type]


def test_littles_law_holds_for_sessions() -> None:
    problem, profiles, held, _ = saturated()
    arrivals = poisson(typical(), per_s=4.0, duration_s=150.0, seed=5)
    engine, scheduler = build_simulation(
        problem,
        profiles,
        as_plan(problem, held),
        Rules(links="in-order"),
    )
    run = Arrivals(engine, scheduler, arrivals, start_s=0.0, end_s=1e9)
    stays: list[float] = []
    done = run.session_done

    def session_done(session: SimulatedSession, now_s: float) -> None:
        stays.append(now_s - session.arrival_s)
        done(session, now_s)

    run.session_done = session_done  # type: ignore[method-assign]
    run.sample()
    engine.run(250.0, run)
    assert run.all_done
    mean_live = sum(run.live_samples) / len(run.live_samples)
    rate, mean_stay_s = len(arrivals) / len(run.live_samples), sum(stays) / len(stays)
    assert mean_live == pytest.approx(rate * mean_stay_s, rel=0.05)


@pytest.mark.parametrize(("tokens_per_s", "per_s"), [(4_000, 5.0), (12_000, 6.0)])
def test_links_in_closed_form_agree_with_the_link_scheduler_slice_by_slice(
    monkeypatch: pytest.MonkeyPatch, tokens_per_s: int, per_s: float
) -> None:
    """Within 5% in the time of a prompt and of a token, at the same arrivals.

    Without micro-batches: whether there are some turns on the smallest differences.
    """
    monkeypatch.setattr("coordinator.policies.batching.scheduler.row_share_of", lambda _: 0.0)
    problem, profiles, held, _ = saturated()
    slow = replace(
        problem,
        model=replace(problem.model, activation_bytes=ROW_BYTES - ID_BYTES),
        default_bandwidth_bytes_per_s=float(ROW_BYTES * tokens_per_s),
    )
    arrivals = poisson(typical(), per_s=per_s, duration_s=15.0, seed=5)
    framed, slices = (
        online(
            slow,
            profiles,
            held,
            arrivals,
            OnlineConfig(measured_s=30.0, rules=Rules(links=links, chunk_tokens=128)),
        )
        for links in ("framed", "anabranch")
    )
    assert framed.sessions_done == slices.sessions_done == len(arrivals)
    for ours, theirs in ((framed.prompt, slices.prompt), (framed.decode, slices.decode)):
        assert ours.mean_s == pytest.approx(theirs.mean_s, rel=0.05)
        assert ours.percentiles_s[95] == pytest.approx(theirs.percentiles_s[95], rel=0.1)
