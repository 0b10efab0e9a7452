"""KV peaks: what the arrays say is what a loop over sessions and stages would say."""

import random

from coordinator.simulator.core.parts import SimulatedPeer, SimulatedSession
from coordinator.simulator.core.profiles import NOTHING
from coordinator.simulator.core.trace import Request
from coordinator.simulator.runs.kv_peaks import KvPeaks


def test_peaks_are_those_of_the_plain_sums() -> None:
    draw = random.Random(3)
    peers = {name: SimulatedPeer(name, 0, 8, NOTHING, 8) for name in "abcd"}
    peaks, expected = KvPeaks(), dict.fromkeys("abcd", 0)
    request = Request(arrival_s=0.0, input_tokens=1, output_tokens=1)
    live = [SimulatedSession(number, request, 0.0) for number in range(5)]
    for turn in range(40):
        for session in live:
            session.tokens_in_kv = draw.randrange(10_000_000)
            if turn == 0 or draw.random() < 0.2:  # a route is replaced, as by a move
                cut = draw.randrange(1, 8)
                session.stages = [(draw.choice("ab"), 0, cut), (draw.choice("cde"), cut, 8)]
        if turn == 20:
            live.pop()
            del peers["b"]
        peaks.look(live, peers)
        for name in peers:
            used = sum(s.tokens_in_kv * (b - a) for s in live for n, a, b in s.stages if n == name)
            expected[name] = max(expected[name], used)
        assert {name: peer.kv_peak for name, peer in peers.items()} == {
            name: expected[name] for name in peers
        }


def test_nobody_and_no_stages_hold_nothing() -> None:
    peer = SimulatedPeer("a", 0, 8, NOTHING, 8)
    peaks = KvPeaks()
    peaks.look([], {"a": peer})
    peaks.look(
        [SimulatedSession(0, Request(arrival_s=0.0, input_tokens=1, output_tokens=1), 0.0)],
        {"a": peer},
    )
    assert peer.kv_peak == 0
