"""The simulator: cases computed by hand, and laws that hold for every swarm."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.simulator import (
    OfflineConfig,
    OnlineConfig,
    PeerProfile,
    Profiles,
    StepLimits,
    offline,
    online,
    typical,
)
from coordinator.simulator.core.event_loop import SwarmSimulation
from coordinator.simulator.core.parts import SimulatedChunk, SimulatedSession
from coordinator.simulator.core.profiles import interpolated
from coordinator.simulator.core.trace import Request, poisson
from coordinator.simulator.routing.helix import ONLINE
from coordinator.simulator.runs.full_load import as_plan, build_simulation
from coordinator.simulator.runs.runs import Arrivals
from dht.messages.types import SINK, SOURCE, Assignment, Link, ModelSpec, PlannerNode, Problem
from tests.examples import examples

PREFILL_S, DECODE_S = 0.001, 0.002
LATENCY_S = 0.5
BYTES_PER_S = 1000.0
STATE_BYTES, ID_BYTES = 10, 2


def profile(limits: StepLimits | None = None, **more: float) -> PeerProfile:
    """1 ms per prompt token and layer; 2 ms per step with decodes and layer, however many."""
    return PeerProfile(
        prefill=((0, 0.0), (1, PREFILL_S), (1000, 1000 * PREFILL_S)),
        decode=((0, 0.0), (1, DECODE_S), (100, DECODE_S)),
        kv_entries=(10_000,),
        limits=(limits or StepLimits(),),
        **more,
    )


def swarm(
    spans: Sequence[tuple[int, int]], profiles: Sequence[PeerProfile] | None = None
) -> tuple[Problem, Profiles, tuple[Assignment, ...]]:
    """Peers ``p0, p1, …`` that hold ``spans``; every link has 1000 bytes/s and half a second."""
    layers = max(end for _, end in spans)
    names = [f"p{index}" for index in range(len(spans))]
    problem = Problem(
        model=ModelSpec(
            name="toy",
            root="f",
            layers=layers,
            layer_bytes=1,
            embed_bytes=0,
            head_bytes=0,
            kv_bytes_per_token_layer=1,
            activation_bytes=STATE_BYTES - ID_BYTES,
            context_tokens=4096,
            vocab=8,
        ),
        nodes=tuple(
            PlannerNode(
                peer_id=name, memory_bytes=1000, kv_tokens_min=0, tokens_per_s=(50.0,) * layers
            )
            for name in names
        ),
        links=tuple(
            Link(
                source=a,
                target=b,
                bandwidth_bytes_per_s=BYTES_PER_S,
                rtt_s=2 * LATENCY_S,
                measured_unix_s=0.0,
            )
            for a in names
            for b in names
            if a != b
        ),
        token_bytes=ID_BYTES,
        client_bandwidth_bytes_per_s=BYTES_PER_S,
    )
    clients = {(SOURCE, name): (BYTES_PER_S, LATENCY_S) for name in names}
    clients |= {(name, SINK): (BYTES_PER_S, LATENCY_S) for name in names}
    each = profiles or [profile()] * len(spans)
    held = tuple(
        Assignment(peer_id=name, start=start, end=end)
        for name, (start, end) in zip(names, spans, strict=True)
    )
    peers = dict(zip(names, each, strict=True))
    return problem, Profiles(peers=peers, client_links=clients), held


@dataclass
class Recorder:
    """Every token's time, by session."""

    prompts: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, list[float]] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)

    def prompt_done(self, session: SimulatedSession, now_s: float) -> None:
        self.prompts[session.number] = now_s

    def token_done(self, session: SimulatedSession, now_s: float, issued_s: float) -> None:
        assert issued_s < now_s
        self.tokens.setdefault(session.number, []).append(now_s)

    def session_done(self, session: SimulatedSession, now_s: float) -> None:
        self.done[session.number] = now_s


def request(input_tokens: int, output_tokens: int) -> Request:
    return Request(arrival_s=0.0, input_tokens=input_tokens, output_tokens=output_tokens)


def start(
    engine: SwarmSimulation, at_s: float, what: Request, route: Sequence[tuple[str, int, int]]
) -> int:
    """Open a session over a route at a time; returns its number."""
    number = start.numbers = getattr(start, "numbers", 0) + 1  # type: ignore[attr-defined]
    session = SimulatedSession(number, what, at_s)
    piece = SimulatedChunk(session, what.input_tokens)
    engine.call_at(at_s, lambda: engine.open(session, route, [piece]))
    return number


def pass_s(tokens: int, layers: Sequence[int], *, prompt: bool) -> float:
    """One pass of ``tokens`` over an idle chain of peers with so many layers each."""
    compute = sum(layers) * (tokens * PREFILL_S if prompt else DECODE_S)
    ends = 2 * (LATENCY_S + tokens * ID_BYTES / BYTES_PER_S)
    between = (len(layers) - 1) * (LATENCY_S + tokens * STATE_BYTES / BYTES_PER_S)
    return compute + ends + between


def test_zero_load_is_the_sum_of_the_parts() -> None:
    engine = SwarmSimulation(*swarm([(0, 3), (3, 5)]))
    seen = Recorder()
    number = start(engine, 1.0, request(100, 3), [("p0", 0, 3), ("p1", 3, 5)])
    engine.run(1e6, seen)
    first = 1.0 + pass_s(100, [3, 2], prompt=True)
    turn = pass_s(1, [3, 2], prompt=False)
    assert seen.prompts[number] == pytest.approx(first)
    assert seen.tokens[number] == pytest.approx([first + turn, first + 2 * turn, first + 3 * turn])


def test_a_decode_behind_a_prompt_waits_for_the_link() -> None:
    engine = SwarmSimulation(*swarm([(0, 1), (1, 2)]))
    seen = Recorder()
    route = [("p0", 0, 1), ("p1", 1, 2)]
    small = start(engine, 0.0, request(1, 1), route)
    # Its prompt is back at 1.516; the large one, sent first, has the link from the clients to 2.0.
    large = start(engine, 1.5, request(250, 1), route)
    engine.run(1e6, seen)
    first = pass_s(1, [1, 1], prompt=True)
    assert 1.5 < first < 1.52
    assert seen.prompts[small] == pytest.approx(first)
    prompt = 1.5 + pass_s(250, [1, 1], prompt=True)
    assert seen.prompts[large] == pytest.approx(prompt)
    # Behind the prompt on each link and in each step; the ring is never faster.
    assert seen.tokens[small][0] > prompt


def test_two_prompts_share_one_step_when_limits_allow() -> None:
    together = SwarmSimulation(*swarm([(0, 4)], [profile(StepLimits(prefills_max=2))]))
    apart = SwarmSimulation(*swarm([(0, 4)], [profile(StepLimits(prefills_max=1))]))
    ends: list[list[float]] = []
    for engine in (together, apart):
        seen = Recorder()
        blocker = start(engine, 0.0, request(20, 1), [("p0", 0, 4)])
        others = [start(engine, 0.0, request(10, 1), [("p0", 0, 4)]) for _ in range(2)]
        engine.run(1e6, seen)
        ends.append([seen.prompts[number] for number in others])
        assert seen.prompts[blocker] < min(seen.prompts[number] for number in others)
    # A step with both takes 20 tokens x 4 layers; alone, the first is through after 10 x 4.
    assert ends[0][0] - ends[1][0] == pytest.approx(10 * 4 * PREFILL_S)
    assert ends[0][1] - ends[1][1] == pytest.approx(10 * ID_BYTES / BYTES_PER_S)


def test_partial_inference_joins_the_batch_at_its_layer() -> None:
    problem, profiles, held = swarm([(0, 2), (0, 6)])
    engine = SwarmSimulation(problem, profiles, held)
    assert [(s.start, s.end) for s in engine.peers["p1"].segments] == [(0, 2), (2, 6)]
    seen = Recorder()
    whole = start(engine, 1.0, request(100, 1), [("p1", 0, 6)])
    # Arrives at p1 at layer 2 while the whole prompt runs [0, 2): one step does both from there.
    arrival = LATENCY_S + 0.01 + 0.01 + LATENCY_S + 0.05
    late = 1.0 + LATENCY_S + 0.2 + 0.1 - arrival
    joined = start(engine, late, request(5, 1), [("p0", 0, 2), ("p1", 2, 6)])
    engine.run(1e6, seen)
    back = LATENCY_S + 100 * ID_BYTES / BYTES_PER_S
    assert seen.prompts[whole] == pytest.approx(
        1.0 + LATENCY_S + 0.2 + 100 * 2 * PREFILL_S + 105 * 4 * PREFILL_S + back
    )
    assert seen.prompts[joined] == pytest.approx(seen.prompts[whole] + 5 * ID_BYTES / BYTES_PER_S)


def test_context_and_decode_limits_hold_in_every_step() -> None:
    limits = StepLimits(decodes_max=2, context_tokens_max=40)
    engine = SwarmSimulation(*swarm([(0, 1)], [profile(limits)]))
    seen = Recorder()
    numbers = [start(engine, 0.0, request(15, 4), [("p0", 0, 1)]) for _ in range(5)]
    engine.run(1e6, seen)
    assert set(seen.done) == set(numbers)
    peer = engine.peers["p0"]
    assert peer.steps >= 5 * 4 / 2


def test_a_route_into_the_middle_of_a_span_needs_a_point_of_entry() -> None:
    engine = SwarmSimulation(*swarm([(0, 6)]))
    with pytest.raises(ValueError, match="cannot be entered at layer 3"):
        engine.peers["p0"].segment_at(3)


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


@given(
    cut=st.integers(1, 5),
    requests=st.lists(
        st.tuples(st.floats(0, 20), st.integers(1, 60), st.integers(1, 8), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    prefills_max=st.integers(1, 3),
)
@examples(60)
def test_every_request_ends_and_no_token_comes_early(
    cut: int, requests: list[tuple[float, int, int, bool]], prefills_max: int
) -> None:
    limits = StepLimits(prefills_max=prefills_max, prefill_tokens_max=64, decodes_max=3)
    engine = SwarmSimulation(*swarm([(0, cut), (cut, 6), (0, 6)], [profile(limits)] * 3))
    seen = Recorder()
    opened: dict[int, tuple[float, Request, list[int]]] = {}
    for at_s, input_tokens, output_tokens, alone in requests:
        what = request(input_tokens, output_tokens)
        # Alone on p2, or by p0 into p2's middle: both share p2's steps.
        route = [("p2", 0, 6)] if alone else [("p0", 0, cut), ("p2", cut, 6)]
        layers = [6] if alone else [cut, 6 - cut]
        opened[start(engine, at_s, what, route)] = at_s, what, layers
    engine.run(1e9, seen)
    assert set(seen.done) == set(opened)
    for number, (at_s, what, layers) in opened.items():
        tokens = seen.tokens[number]
        assert len(tokens) == what.output_tokens
        earliest = at_s + pass_s(what.input_tokens, layers, prompt=True)
        assert seen.prompts[number] >= earliest - 1e-9
        for before, after in zip([seen.prompts[number], *tokens], tokens, strict=False):
            assert after - before >= pass_s(1, layers, prompt=False) - 1e-9
    # Conservation: each peer ran each token of each route over it exactly once.
    through = {"p0": 0, "p2": 0}
    for _, what, layers in opened.values():
        for name in ["p2"] if len(layers) == 1 else ["p0", "p2"]:
            through[name] += what.input_tokens + what.output_tokens
    assert {name: engine.peers[name].tokens for name in through} == through
    assert not any(link.arrivals for link in engine.links.values())


def saturated(seed: int = 3) -> tuple[Problem, Profiles, tuple[Assignment, ...], OfflineConfig]:
    limits = StepLimits(prefills_max=1, prefill_tokens_max=2048, decodes_max=64)
    fast = PeerProfile(
        prefill=((0, 0.0), (2048, 0.05)),
        decode=((0, 0.0), (64, 0.004)),
        kv_entries=(400_000,),
        limits=(limits,),
    )
    problem, profiles, held = swarm([(0, 4), (4, 8), (0, 4)], [fast] * 3)
    quick = dict.fromkeys(profiles.client_links, (1e9, 0.0005))
    problem = Problem(
        model=problem.model,
        nodes=problem.nodes,
        default_bandwidth_bytes_per_s=1e9,
        default_rtt_s=0.001,
        token_bytes=2,
        client_bandwidth_bytes_per_s=1e9,
    )
    config = OfflineConfig(seed=seed, warm_up_s=10.0, measured_s=30.0, first_requests=5)
    return problem, Profiles(peers=profiles.peers, client_links=quick), held, config


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
    # The scheduler bounds expected lengths, not real ones: a few long answers may go beyond.
    assert all(use.kv_peak <= 1.05 for use in report.peers.values())
    # Little's law for decodes: at most one per session is under way, and the room bounds sessions.
    under_way = report.decode_tokens_per_s * report.decode.mean_s
    assert under_way <= 400_000 / (4 * 244)
    assert report.decode.count == round(report.decode_tokens_per_s * report.measured_s)


@pytest.mark.parametrize("scheduler", ["anabranch", "swarm", "random", "shortest-queue"])
@pytest.mark.parametrize("links", ["in-order", "framed", "anabranch"])
def test_every_scheduler_and_link_policy_serves_all_that_arrives(
    scheduler: str, links: str
) -> None:
    problem, profiles, held, _ = saturated()
    arrivals = poisson(typical(), per_s=1.0, duration_s=20.0, seed=5)
    config = OnlineConfig(measured_s=20.0, scheduler=scheduler, links=links, chunk_tokens=256)
    report = online(problem, profiles, held, arrivals, config)
    assert report.sessions_done == report.sessions_opened == len(arrivals)
    assert all(use.kv_peak <= 1 for use in report.peers.values())


def test_littles_law_holds_for_sessions() -> None:
    problem, profiles, held, _ = saturated()
    arrivals = poisson(typical(), per_s=4.0, duration_s=150.0, seed=5)
    engine, scheduler = build_simulation(
        problem,
        profiles,
        as_plan(problem, held),
        scheduler="anabranch",
        links="in-order",
        rules=ONLINE,
        seed=0,
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


def test_links_in_closed_form_agree_with_the_link_scheduler_frame_by_frame() -> None:
    problem, profiles, held, _ = saturated()
    slow = replace(problem, default_bandwidth_bytes_per_s=40_000.0)  # 10 bytes a token: 4,000/s
    reports = [
        offline(
            slow,
            profiles,
            held,
            typical(),
            OfflineConfig(warm_up_s=2.0, measured_s=12.0, scheduler="anabranch", links=links),
        )
        for links in ("framed", "anabranch", "in-order")
    ]
    framed, frames, in_order = (report.decode_tokens_per_s for report in reports)
    assert framed == pytest.approx(frames, rel=0.05)
    assert frames > 1.1 * in_order
