"""Sessions that move in the simulator: nothing is lost, promises are kept, and room is made."""

import pytest

from bench.papers.llumnix import pipelines
from coordinator.experiments.moves import MoveRules, Moving
from coordinator.experiments.pipelines import Pipelines
from coordinator.simulator.core.parts import SimulatedSession
from coordinator.simulator.core.swarm import LiveSwarm
from coordinator.simulator.core.trace import Request, heavy_tailed
from coordinator.simulator.links.closed_form_wire import FramedWire

LONGEST_S = 4000.0


class Counted(Moving):
    """Counts tokens by session, and looks at promises with each of them."""

    def __init__(self, *args, **kwargs) -> None:
        self.tokens: dict[int, int] = {}
        self.asked: dict[int, int] = {}
        super().__init__(*args, **kwargs)

    def token_done(self, session: SimulatedSession, now_s: float, issued_s: float) -> None:
        assert now_s >= issued_s
        self.tokens[session.number] = self.tokens.get(session.number, 0) + 1
        self.asked[session.number] = session.output_tokens
        assert all(room >= 0 for room in self._pipelines.room.values())
        super().token_done(session, now_s, issued_s)


def build(requests, rules: MoveRules, *, dispatch: str = "freest", headroom: float = 0.0):
    problem, profiles, plan = pipelines()
    engine = LiveSwarm(problem, profiles, plan.assignments, FramedWire)
    pipes = Pipelines(problem, profiles, plan, dispatch=dispatch, headroom=headroom)
    run = Counted(engine, pipes, requests, rules, start_s=0.0, end_s=1e9)
    return engine, pipes, run


def finish(engine: LiveSwarm, run: Moving) -> None:
    while not run.all_done:
        assert engine.now_s < LONGEST_S, "some request never ends"
        engine.run(engine.now_s + 1.0, run)


def ask(arrival_s: float, tokens: int, *, urgent: bool = False) -> Request:
    """A short prompt and a long answer, ``tokens`` in all."""
    return Request(arrival_s=arrival_s, input_tokens=100, output_tokens=tokens - 100, urgent=urgent)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("leaves", ["", "drains", "vanishes"])
def test_every_request_gets_every_token_once_whatever_moves(seed: int, leaves: str) -> None:
    requests = heavy_tailed(per_s=1.5, duration_s=60.0, mean_tokens=250.0, urgent=0.1, seed=seed)
    engine, pipes, run = build(requests, MoveRules(balance=True), headroom=0.1)
    gone = pipes.routes[1][2][0]
    if leaves == "drains":
        run.drain_at(gone, 20.0)
    elif leaves == "vanishes":
        run.lose_at(gone, 20.0)
    finish(engine, run)
    assert run.sessions_done == len(requests)
    assert len(run.asked) == len(requests)
    assert run.tokens == run.asked
    assert pipes.room == pipes.capacity, "every promise was given back"
    assert set(pipes.count.values()) == {0}
    assert (gone in engine.peers) == (not leaves)


def test_a_drained_peer_hands_over_without_a_gap_and_a_lost_one_costs_its_notice() -> None:
    gaps = {}
    for leaves in ("drains", "vanishes"):
        engine, pipes, run = build([ask(0.0, 600), ask(0.1, 600)], MoveRules())
        first = pipes.routes[0][1][0]
        getattr(run, "drain_at" if leaves == "drains" else "lose_at")(first, 10.0)
        finish(engine, run)
        assert run.moves == 1
        assert run.losses == (leaves == "vanishes")
        gaps[leaves] = max(run.moved_gaps_s)
    usual_s = sorted(run.decode_s)[len(run.decode_s) // 2]
    assert gaps["drains"] < 4 * usual_s
    assert MoveRules().noticed_s < gaps["vanishes"] < MoveRules().noticed_s + 2.0


def test_room_is_made_for_a_request_that_fits_nowhere() -> None:
    """Each of four pipelines has room for 13,616 tokens: two of 4,000 leave 5,616 in each."""
    small = [ask(0.0, 4_000) for _ in range(8)]
    long = ask(5.0, 9_000)
    waits_s = {}
    for balance in (False, True):
        engine, _, run = build([*small, long], MoveRules(balance=balance), dispatch="turns")
        finish(engine, run)
        assert run.sessions_done == 9
        waits_s[balance] = max(run.prompt_s)
    assert waits_s[True] < 20.0 < waits_s[False]


def test_the_headroom_is_for_urgent_requests() -> None:
    """Four of 12,500 leave 1,116 tokens in each pipeline, less than the tenth that is kept."""
    full = [ask(0.0, 12_500) for _ in range(4)]
    engine, pipes, run = build(full, MoveRules(), headroom=0.1)
    engine.run(1.0, run)
    ordinary = SimulatedSession(90, ask(1.0, 1_000), 1.0)
    urgent = SimulatedSession(91, ask(1.0, 1_000, urgent=True), 1.0)
    assert pipes.route(ordinary) is None
    assert pipes.route(urgent) is not None


def test_freest_goes_where_the_most_room_per_session_is() -> None:
    _, pipes, _ = build([], MoveRules())
    sessions = [SimulatedSession(n, ask(0.0, 1_000 * (n + 1)), 0.0) for n in range(5)]
    taken = [pipes.route(session) for session in sessions]
    assert len({stages[0][0] for stages in taken[:4]}) == 4, "empty pipelines first"
    assert taken[4] == taken[0], "then beside the shortest"


def test_a_dispatch_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="there are"):
        build([], MoveRules(), dispatch="best")
