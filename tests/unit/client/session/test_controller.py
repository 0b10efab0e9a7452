"""The owner's machine under anything that stages and the network may do.

A model of the peers stands behind it: what each effect reserves, and what frees it. Events come in
any order: late, repeated, of old attempts, of crashed peers, and from planned moves in every state.
"""

from collections.abc import Set
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.answer.answer import AnswerLog, AnswerRequest
from client.session.config import SessionConfig
from client.session.controller import (
    ControllerState,
    SessionController,
)
from client.session.events import (
    Accepted,
    Arrived,
    Avoid,
    CopyKv,
    Deliver,
    Effect,
    Event,
    Feed,
    FindMigrationRoute,
    FindRoute,
    GiveUp,
    Leave,
    Leaving,
    Lost,
    MigrationCaughtUp,
    MigrationRouteFound,
    Open,
    OpenMigration,
    Refused,
    RouteFound,
)
from coordinator.policies.routing.affinity import Route
from coordinator.policies.routing.routes import NoRoute
from dht.messages.session import OVERFLOWS, RefusalCode, Sampling
from dht.messages.types import RouteStage
from tests.choices import Choices, choices
from tests.examples import examples
from tests.unit.records import MODEL

CONFIG = SessionConfig()

NOBODY = NoRoute(reason="nobody")
NEW = 12
TRUTH = tuple(range(500, 500 + NEW))
PROMPT = (1, 2, 3)
PEERS = "abcdefgh"
CUTS = ((0, 8), (0, 4, 8), (0, 3, 6, 8), (0, 2, 4, 6, 8))
EVENTS = ("accept",) * 2 + ("tokens",) * 3 + ("refuse", "lose", "leave", "warm")
CODES = (RefusalCode.NO_KV, RefusalCode.UNREACHABLE, RefusalCode.NO_COPY)
DECISIONS = 400
"""More than nearly every life takes: 130 in the mean."""


class World:
    """Answers the owner's effects as peers would, and keeps book of what they hold."""

    def __init__(self, chosen: Choices) -> None:
        self.chosen = chosen
        self.log = AnswerLog(
            request=AnswerRequest(
                model=MODEL, prompt_ids=PROMPT, max_new_tokens=NEW, sampling=Sampling()
            )
        )
        self.controller = SessionController(log=self.log, wait_s=60.0)
        self.now_s = 0.0
        self.delivered: list[int] = []
        self.holds: dict[str, int] = {}
        """The attempt under which each peer reserved last; a refusal or a close frees it."""
        self.fresh: set[str] = set()
        """Who held nothing before the newest open."""
        self.dead: set[str] = set()
        self.attempts: list[int] = []
        self.past: list[Event] = []
        self.ended = False

    def route(self, without: frozenset[str] = frozenset()) -> Route | NoRoute:
        living = [peer for peer in PEERS if peer not in self.dead | without]
        cuts = self.chosen.one_of(CUTS)
        if len(living) < len(cuts) - 1:
            return NoRoute(reason="nobody")
        peers = self.chosen.shuffled(living)
        return tuple(
            RouteStage(peer_id=peer, start=start, end=end)
            for peer, start, end in zip(peers, cuts, cuts[1:], strict=False)
        )

    def swap(self, old: Route, leaving: str, to: str) -> Route | NoRoute:
        """One peer in the place of another, unless it is dead or on the route."""
        if to in self.dead or to in {stage.peer_id for stage in old}:
            return NoRoute(reason="it cannot")
        return tuple(replace(s, peer_id=to) if s.peer_id == leaving else s for s in old)

    def mend(self, old: Route, lost: Set[str]) -> Route | NoRoute:
        """Keeps survivors, as the real one does; sometimes nothing can be had."""
        if self.chosen.below(10) == 0:
            return NoRoute(reason="nobody")
        kept = {stage.peer_id for stage in old} - lost
        spare = [p for p in PEERS if p not in kept | self.dead | lost]
        mended: list[RouteStage] = []
        for stage in old:
            if stage.peer_id in kept:
                mended.append(stage)
            elif spare:
                peer = spare.pop(self.chosen.below(len(spare)))
                mended.append(RouteStage(peer_id=peer, start=stage.start, end=stage.end))
            else:
                return NoRoute(reason="nobody")
        return tuple(mended)

    def perform(self, effects: list[Effect]) -> None:
        """Effects that have an immediate answer get it; the others change the book."""
        todo = list(effects)
        while todo:
            effect = todo.pop(0)
            match effect:
                case FindRoute(mend=old, lost=lost, after_s=after_s):
                    self.now_s += after_s
                    route = self.mend(old, lost) if old else self.route(lost)
                    todo += self.controller.step(RouteFound(route=route), self.now_s)
                case FindMigrationRoute(mend=old, leaving=leaving, to=to):
                    route = self.swap(old, leaving, to) if to else self.mend(old, {leaving})
                    found = MigrationRouteFound(route=route, mend=old)
                    self.past.append(found)  # it may come late, and find another route
                    if self.chosen.yes():
                        todo += self.controller.step(found, self.now_s)
                case Open(attempt=attempt, route=route):
                    assert attempt == self.log.attempt
                    assert not self.attempts or attempt > self.attempts[-1], "attempts only grow"
                    self.attempts.append(attempt)
                    asked = {stage.peer_id for stage in route}
                    self.fresh = asked - set(self.holds)
                    self.holds.update(dict.fromkeys(asked, attempt))
                case OpenMigration(attempt=attempt, route=route, until=until):
                    assert attempt > self.attempts[-1]
                    self.attempts.append(attempt)
                    assert self.controller.state is ControllerState.RUNNING, "the answer goes on"
                    new = [s for s in route[: until + 1] if s not in self.controller.accepted]
                    self.holds.update(dict.fromkeys((s.peer_id for s in new), attempt))
                case CopyKv(attempt=attempt, source=source, to=to):
                    assert attempt == self.attempts[-1] > self.log.attempt, "of the newest copies"
                    serving = {stage.peer_id for stage in self.controller.accepted}
                    assert source in serving
                    assert to not in serving
                case Leave(attempt=attempt, stages=stages):
                    for stage in stages:
                        assert stage not in self.controller.accepted, "a serving stage was closed"
                        if self.holds.get(stage.peer_id, attempt + 1) <= attempt:
                            del self.holds[stage.peer_id]
                case Feed(attempt=attempt):
                    assert attempt == self.log.attempt
                case Deliver(token_ids=ids):
                    self.delivered += ids
                case GiveUp():
                    self.ended = True
                case Avoid():
                    pass
            assert tuple(self.delivered) == TRUTH[: len(self.delivered)]

    def happen(self, event: Event) -> None:
        if isinstance(event, Refused):
            if self.holds.get(event.peer_id) == event.attempt:
                del self.holds[event.peer_id]
            if event.code is RefusalCode.NO_KV and self.controller.state is ControllerState.OPENING:
                # The stages before it pass the refusal up, and forget what is new to them.
                for peer in self.fresh & set(self.holds):
                    if self.holds[peer] == event.attempt:
                        del self.holds[peer]
        self.past.append(event)
        self.perform(self.controller.step(event, self.now_s))

    def event(self) -> Event:
        """Something that may happen now, plausible or not."""
        chosen = self.chosen
        controller, attempt = self.controller, self.log.attempt
        peers = [stage.peer_id for stage in controller.route] or list(PEERS)
        peer = chosen.one_of(peers)
        move_attempt = controller.move.attempt if controller.move is not None else attempt + 1
        at = chosen.one_of([attempt, attempt, attempt, move_attempt, max(0, attempt - 1)])
        start = chosen.below(NEW)
        kind = chosen.one_of((*EVENTS, "again") if self.past else EVENTS)
        match kind:
            case "accept":
                rows = chosen.yes()
                position = chosen.below(len(PROMPT) + NEW + 1)
                return Accepted(attempt=at, position=position, rows=rows)
            case "tokens":
                known = len(self.log.token_ids)
                start = min(start, known) if chosen.yes() else known
                ids = TRUTH[start : start + chosen.below(4)]
                return Arrived(attempt=at, position=len(PROMPT) + start, token_ids=ids)
            case "refuse":
                code = chosen.one_of(CODES)
                return Refused(attempt=at, peer_id=peer, code=code, reason="r")
            case "lose":
                if len(self.dead) < 3 and chosen.yes():
                    self.dead.add(peer)
                    self.holds.pop(peer, None)
                return Lost(attempt=at, peer_id=peer, reason="r", watched=self.chosen.yes())
            case "leave":
                to = chosen.one_of(PEERS) if chosen.yes() else ""
                self.now_s += CONFIG.relief_every_s if to and chosen.yes() else 0.0
                return Leaving(attempt=at, peer_id=peer, to=to)
            case "warm":
                return MigrationCaughtUp(attempt=at)
            case _:
                return chosen.one_of(self.past)

    def calm(self) -> None:
        """From now on everybody does what is asked: the answer must come to its end."""
        for _ in range(200):
            self.now_s += 0.01
            match self.controller.state:
                case ControllerState.OPENING:
                    self.happen(Accepted(attempt=self.log.attempt, position=0))
                case ControllerState.RUNNING:
                    known = len(self.log.token_ids)
                    ids = TRUTH[known : known + 1]
                    position = len(PROMPT) + known
                    self.happen(Arrived(attempt=self.log.attempt, position=position, token_ids=ids))
                case _:
                    return


def live(chosen: Choices, steps: int) -> None:
    """One session's life, and what must hold in the end."""
    world = World(chosen)
    world.perform(world.controller.start(0.0))
    for _ in range(steps):
        if world.controller.state in {ControllerState.DONE, ControllerState.GAVE_UP}:
            break
        world.happen(world.event())
    world.calm()
    controller = world.controller
    if controller.state is ControllerState.GAVE_UP:
        return
    assert controller.state is ControllerState.DONE
    assert tuple(world.delivered) == TRUTH
    # What is still held is what the end closes: the route, and the stages of a move under way.
    closed = {stage.peer_id for stage in (*controller.accepted, *controller.touched)}
    if controller.move is not None:
        closed |= {stage.peer_id for stage in controller.move.route}
    assert set(world.holds) - world.dead <= closed


def test_a_stage_that_always_gives_way_is_not_waited_for_for_ever() -> None:
    route = (RouteStage(peer_id="a", start=0, end=8),)
    request = AnswerRequest(model=MODEL, prompt_ids=PROMPT, max_new_tokens=9, sampling=Sampling())
    controller = SessionController(log=AnswerLog(request=request), wait_s=0.0)
    controller.start(0.0)
    now_s = 0.0
    while controller.state is not ControllerState.GAVE_UP:
        assert now_s < CONFIG.paused_s + 20.0
        if controller.state is ControllerState.DRAWING:
            controller.step(RouteFound(route=route if now_s < CONFIG.paused_s else NOBODY), now_s)
        controller.step(Accepted(attempt=controller.attempt, position=0), now_s)
        if now_s == 0.0:
            controller.step(Arrived(attempt=controller.attempt, position=3, token_ids=(7,)), now_s)
        now_s += 10.0
        gone = Lost(attempt=controller.attempt, peer_id="a", reason="needed", retry_after_s=8.0)
        controller.step(gone, now_s)
    assert now_s >= CONFIG.paused_s, (
        "an answer that began is waited for, though its client does not wait"
    )
    assert (controller.failovers, controller.attempt > 3) == (0, True)


def test_peers_that_fail_in_turns_do_not_hold_an_answer_for_ever() -> None:
    """There is a route at every look, and none of them brings a token."""
    routes = [(RouteStage(peer_id=peer, start=0, end=8),) for peer in "ab"]
    request = AnswerRequest(model=MODEL, prompt_ids=PROMPT, max_new_tokens=9, sampling=Sampling())
    controller = SessionController(log=AnswerLog(request=request), wait_s=60.0)
    controller.start(0.0)
    ended: list[Effect] = []
    for turn in range(CONFIG.fruitless_max + 1):
        assert controller.state is ControllerState.DRAWING
        now_s = 31.0 * turn
        ended = controller.step(RouteFound(route=routes[turn % 2]), now_s)
        controller.step(Accepted(attempt=controller.attempt, position=0), now_s)
        peer_id = routes[turn % 2][0].peer_id
        controller.step(Lost(attempt=controller.attempt, peer_id=peer_id, reason="stalls"), now_s)
    assert any(isinstance(each, GiveUp) for each in ended)
    assert controller.state is ControllerState.GAVE_UP


@pytest.mark.parametrize("watched", [True, False])
def test_who_was_lost_with_an_earlier_route_is_not_waited_for_on_the_next(watched: bool) -> None:
    """A stage that noticed first was taken for the lost one; then the client's own watch speaks."""
    a, b, c = (RouteStage(peer_id=peer, start=0, end=4) for peer in "abc")
    ends = RouteStage(peer_id="z", start=4, end=8)
    request = AnswerRequest(model=MODEL, prompt_ids=PROMPT, max_new_tokens=9, sampling=Sampling())
    controller = SessionController(log=AnswerLog(request=request), wait_s=60.0)
    controller.start(0.0)
    controller.step(RouteFound(route=(a, ends)), 0.0)
    first = controller.attempt
    controller.step(Accepted(attempt=first, position=0), 0.0)
    controller.step(Lost(attempt=first, peer_id="z", reason="said to be silent"), 2.0)
    controller.step(RouteFound(route=(a, replace(ends, peer_id="y"))), 2.0)
    late = Lost(attempt=first, peer_id="a", reason="silent for 2.0 s", watched=watched)
    effects = controller.step(late, 2.0)
    assert any(isinstance(each, FindRoute) for each in effects) == watched
    if watched:
        assert "a" in controller.lost
        controller.step(RouteFound(route=(b, ends)), 2.0)
        assert not controller.step(replace(late, peer_id="c"), 2.0), "it is not on the route"
        controller.step(Accepted(attempt=controller.attempt, position=0), 2.0)
        assert not controller.step(replace(late, peer_id="b"), 2.0), "it has answered since"
    assert c not in controller.route


@pytest.mark.property
@examples(400)
@given(chosen=choices(DECISIONS), steps=st.integers(0, 40))
def test_every_token_once_and_nothing_is_left_reserved(chosen: Choices, steps: int) -> None:
    live(chosen, steps)


@pytest.mark.parametrize("overflows", [True, False])
def test_an_overflow_ends_a_request_at_once_where_there_is_no_other_route(overflows: bool) -> None:
    request = AnswerRequest(model=MODEL, prompt_ids=PROMPT, max_new_tokens=3, sampling=Sampling())
    controller = SessionController(log=AnswerLog(request=request), wait_s=60.0)
    controller.start(0.0)
    route = (RouteStage(peer_id="a", start=0, end=4), RouteStage(peer_id="b", start=4, end=8))
    controller.step(RouteFound(route=route), 0.0)
    controller.step(Accepted(attempt=controller.attempt, position=0), 0.0)
    reason = f"layers [4, 8) {OVERFLOWS if overflows else 'were lost'}"
    [avoid, _] = controller.step(Lost(attempt=controller.attempt, peer_id="b", reason=reason), 1.0)
    assert avoid == Avoid(peer_id="b", code=None, reason=reason)
    effects = controller.step(RouteFound(route=NOBODY), 1.0)
    ended = [effect for effect in effects if isinstance(effect, GiveUp)]
    assert ended == ([GiveUp(reason=reason)] if overflows else [])
