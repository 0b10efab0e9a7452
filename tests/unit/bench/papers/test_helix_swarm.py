"""Helix's rules on paper: cases computed by hand, and laws that hold for every swarm."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.papers.helix_swarm import HelixSwarm
from coordinator.simulator.core.profiles import StepLimits
from coordinator.simulator.core.trace import Request
from tests.examples import examples
from tests.unit.coordinator.simulator.toy import (
    BYTES_PER_S,
    ID_BYTES,
    LATENCY_S,
    PREFILL_S,
    REQUESTS,
    Recorder,
    pass_s,
    profile,
    request,
    start,
    swarm,
)


def test_zero_load_is_the_sum_of_the_parts() -> None:
    engine = HelixSwarm(*swarm([(0, 3), (3, 5)]))
    seen = Recorder()
    number = start(engine, 1.0, request(100, 3), [("p0", 0, 3), ("p1", 3, 5)])
    engine.run(1e6, seen)
    first = 1.0 + pass_s(100, [3, 2], prompt=True)
    turn = pass_s(1, [3, 2], prompt=False)
    assert seen.prompts[number] == pytest.approx(first)
    assert seen.tokens[number] == pytest.approx([first + turn, first + 2 * turn, first + 3 * turn])


def test_a_decode_behind_a_prompt_waits_for_the_link() -> None:
    engine = HelixSwarm(*swarm([(0, 1), (1, 2)]))
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
    together = HelixSwarm(*swarm([(0, 4)], [profile(StepLimits(prefills_max=2))]))
    apart = HelixSwarm(*swarm([(0, 4)], [profile(StepLimits(prefills_max=1))]))
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
    engine = HelixSwarm(problem, profiles, held)
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
    engine = HelixSwarm(*swarm([(0, 1)], [profile(limits)]))
    seen = Recorder()
    numbers = [start(engine, 0.0, request(15, 4), [("p0", 0, 1)]) for _ in range(5)]
    engine.run(1e6, seen)
    assert set(seen.done) == set(numbers)
    peer = engine.peers["p0"]
    assert peer.steps >= 5 * 4 / 2


def test_a_route_into_the_middle_of_a_span_needs_a_point_of_entry() -> None:
    engine = HelixSwarm(*swarm([(0, 6)]))
    with pytest.raises(ValueError, match="cannot be entered at layer 3"):
        engine.peers["p0"].segment_at(3)


@given(
    cut=st.integers(1, 5),
    requests=REQUESTS,
    prefills_max=st.integers(1, 3),
)
@examples(60)
def test_every_request_ends_and_no_token_comes_early(
    cut: int, requests: list[tuple[float, int, int, bool]], prefills_max: int
) -> None:
    limits = StepLimits(prefills_max=prefills_max, prefill_tokens_max=64, decodes_max=3)
    engine = HelixSwarm(*swarm([(0, cut), (cut, 6), (0, 6)], [profile(limits)] * 3))
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
