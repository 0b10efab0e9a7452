"""Sessions that move in the simulator: nothing is lost, and all that was promised is given back."""

import pytest

from bench.papers.arrivals import heavy_tailed
from bench.papers.freest import Freest
from bench.papers.llumnix import pipelines
from bench.papers.moves import MoveRules, Moving
from coordinator.policies.routing.balance import BalanceConfig
from coordinator.simulator.clients import Clients
from coordinator.simulator.core.parts import SimulatedSession
from coordinator.simulator.core.swarm import LiveSwarm
from coordinator.simulator.core.trace import Request
from coordinator.simulator.links.closed_form_wire import FramedWire
from tests.unit.coordinator.policies.admission.accounts import check_room

LONGEST_S = 4000.0
EVENS = BalanceConfig(evens=True, evening_slower_s=1.0)
"""Moves between pipelines that are far apart, which no peer asks for."""


class Counted(Moving):
    """Counts tokens by session, and looks at the stages' accounts with each of them."""

    def __init__(self, *args, **kwargs) -> None:
        self.tokens: dict[int, int] = {}
        self.asked: dict[int, int] = {}
        super().__init__(*args, **kwargs)

    def token_done(self, session: SimulatedSession, now_s: float, issued_s: float) -> None:
        assert now_s >= issued_s
        self.tokens[session.number] = self.tokens.get(session.number, 0) + 1
        self.asked[session.number] = session.output_tokens
        if session.left_tokens % 64 == 0:
            for room in self._clients.rooms.values():
                check_room(room)
        super().token_done(session, now_s, issued_s)


def build(requests, rules: MoveRules, dispatch: type[Clients] = Freest):
    problem, profiles, plan = pipelines()
    swarm = LiveSwarm(problem, profiles, plan.assignments, FramedWire)
    clients = dispatch(problem, profiles, plan, swarm.peers)
    return swarm, clients, Counted(swarm, clients, requests, rules, start_s=0.0, end_s=1e9)


def finish(swarm: LiveSwarm, run: Moving) -> None:
    while not run.all_done:
        assert swarm.now_s < LONGEST_S, "some request never ends"
        swarm.run(swarm.now_s + 1.0, run)


def ask(arrival_s: float, tokens: int) -> Request:
    """A short prompt and a long answer, ``tokens`` in all."""
    return Request(arrival_s=arrival_s, input_tokens=100, output_tokens=tokens - 100)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("leaves", ["", "drains", "vanishes"])
def test_every_request_gets_every_token_once_whatever_moves(seed: int, leaves: str) -> None:
    requests = heavy_tailed(per_s=1.5, duration_s=60.0, mean_tokens=250.0, urgent=0.1, seed=seed)
    swarm, clients, run = build(requests, MoveRules(balance=EVENS))
    gone = sorted(clients.rooms)[5]
    if leaves == "drains":
        run.drain_at(gone, 20.0)
    elif leaves == "vanishes":
        run.lose_at(gone, 20.0)
    finish(swarm, run)
    assert run.sessions_done == len(requests)
    assert len(run.asked) == len(requests)
    assert run.tokens == run.asked
    assert not any(room.charged_tokens for room in clients.rooms.values()), "all is given back"
    assert not any(peer.sessions or len(peer.scheduler) for peer in swarm.peers.values())
    assert (gone in swarm.peers) == (not leaves)


def test_a_drained_peer_hands_over_without_a_gap_and_a_lost_one_costs_its_notice() -> None:
    gaps = {}
    for leaves in ("drains", "vanishes"):
        swarm, _, run = build([ask(0.0, 600), ask(0.1, 600)], MoveRules())
        swarm.run(10.0, run)
        first = run.live[0].stages[1][0]
        getattr(run, "drain_at" if leaves == "drains" else "lose_at")(first, 10.0)
        finish(swarm, run)
        assert run.moves == 1
        assert run.losses == (leaves == "vanishes")
        gaps[leaves] = max(run.moved_gaps_s)
    usual_s = sorted(run.decode_s)[len(run.decode_s) // 2]
    assert gaps["drains"] < 4 * usual_s
    assert MoveRules().noticed_s < gaps["vanishes"] < MoveRules().noticed_s + 2.0


def test_peers_with_many_sessions_give_some_to_those_with_none() -> None:
    spread = {}
    for balance in (False, True):
        swarm, clients, run = build([], MoveRules(balance=EVENS if balance else None))
        crowded = clients._routes[0]
        for number in range(12):
            session = SimulatedSession(number, ask(0.0, 1_000), 0.0)
            assert clients.admit(session, crowded, 0.0) is None
            run.opened += 1
            run.live[number] = session
            session.tokens_in_kv = 100
            swarm.place(session, crowded)
            swarm.enter(session)
        swarm.run(30.0, run)
        spread[balance] = [swarm.peers[name].sessions for name, _, _ in crowded]
        finish(swarm, run)
        assert run.tokens == run.asked
        assert (run.moves > 0) == balance
    assert spread[False] == [12] * 4
    assert max(spread[True]) < 10


def test_freest_goes_where_the_most_room_per_session_is() -> None:
    swarm, _, run = build([ask(0.0, 1_000 * (n + 1)) for n in range(5)], MoveRules())
    swarm.run(0.1, run)
    taken = [session.stages for session in run.live.values()]
    assert len({stages[0][0] for stages in taken[:4]}) == 4, "empty pipelines first"
    assert taken[4][0][0] in {stages[0][0] for stages in taken[:4]}


def test_where_pipelines_are_far_apart_nothing_moves_to_even_them_out() -> None:
    """A move there makes each later token a third slower, and keeps its KV as much longer."""
    requests = heavy_tailed(per_s=1.5, duration_s=60.0, mean_tokens=250.0, urgent=0.0, seed=0)
    for config, moves in ((BalanceConfig(evens=True), False), (EVENS, True)):
        swarm, _, run = build(requests, MoveRules(balance=config))
        finish(swarm, run)
        assert (run.moves > 0) == moves
