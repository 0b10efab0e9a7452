"""The owner's machine under anything that stages and the network may do.

A model of the peers stands behind it: what each effect reserves, and what frees it. Events come in
any order: late, repeated, of old epochs, of crashed peers, and from planned moves in every state.
"""

from collections.abc import Set
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.session.events import (
    Accepted,
    Arrived,
    Avoid,
    CopyKv,
    Deliver,
    Draw,
    DrawMove,
    Drawn,
    Effect,
    Event,
    Feed,
    GiveUp,
    Leave,
    Leaving,
    Lost,
    MoveDrawn,
    Open,
    Refused,
    Route,
    Warm,
    Warmed,
)
from client.session.failover import RELIEF_EVERY_S, Owner, OwnerState
from client.session.token_log import AnswerLog, AnswerRequest
from coordinator.routing.routes import NoRoute
from dht.messages.session import RefusalCode, Sampling
from dht.messages.types import RouteStage
from tests.choices import Choices, choices
from tests.examples import examples

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
            request=AnswerRequest(prompt_ids=PROMPT, max_new_tokens=NEW, sampling=Sampling())
        )
        self.owner = Owner(log=self.log, wait_s=60.0)
        self.now_s = 0.0
        self.delivered: list[int] = []
        self.holds: dict[str, int] = {}
        """The epoch under which each peer reserved last; a refusal or a close frees it."""
        self.fresh: set[str] = set()
        """Who held nothing before the newest open."""
        self.dead: set[str] = set()
        self.epochs: list[int] = []
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
                case Draw(mend=old, lost=lost, after_s=after_s):
                    self.now_s += after_s
                    route = self.mend(old, lost) if old else self.route(lost)
                    todo += self.owner.step(Drawn(route=route), self.now_s)
                case DrawMove(mend=old, leaving=leaving, to=to):
                    route = self.swap(old, leaving, to) if to else self.mend(old, {leaving})
                    todo += self.owner.step(MoveDrawn(route=route), self.now_s)
                case Open(epoch=epoch, route=route):
                    assert epoch == self.log.epoch
                    assert not self.epochs or epoch > self.epochs[-1], "epochs only grow"
                    self.epochs.append(epoch)
                    asked = {stage.peer_id for stage in route}
                    self.fresh = asked - set(self.holds)
                    self.holds.update(dict.fromkeys(asked, epoch))
                case Warm(epoch=epoch, route=route, until=until):
                    assert epoch > self.epochs[-1]
                    self.epochs.append(epoch)
                    assert self.owner.state is OwnerState.RUNNING, "the answer goes on"
                    new = [s for s in route[: until + 1] if s not in self.owner.accepted]
                    self.holds.update(dict.fromkeys((s.peer_id for s in new), epoch))
                case CopyKv(epoch=epoch, source=source, to=to):
                    assert epoch == self.epochs[-1] > self.log.epoch, "of the newest copies"
                    serving = {stage.peer_id for stage in self.owner.accepted}
                    assert source in serving
                    assert to not in serving
                case Leave(epoch=epoch, stages=stages):
                    for stage in stages:
                        assert stage not in self.owner.accepted, "a serving stage was closed"
                        if self.holds.get(stage.peer_id, epoch + 1) <= epoch:
                            del self.holds[stage.peer_id]
                case Feed(epoch=epoch):
                    assert epoch == self.log.epoch
                case Deliver(token_ids=ids):
                    self.delivered += ids
                case GiveUp():
                    self.ended = True
                case Avoid():
                    pass
            assert tuple(self.delivered) == TRUTH[: len(self.delivered)]

    def happen(self, event: Event) -> None:
        if isinstance(event, Refused):
            if self.holds.get(event.peer_id) == event.epoch:
                del self.holds[event.peer_id]
            if event.code is RefusalCode.NO_KV and self.owner.state is OwnerState.OPENING:
                # The stages before it pass the refusal up, and forget what is new to them.
                for peer in self.fresh & set(self.holds):
                    if self.holds[peer] == event.epoch:
                        del self.holds[peer]
        self.past.append(event)
        self.perform(self.owner.step(event, self.now_s))

    def event(self) -> Event:
        """Something that may happen now, plausible or not."""
        chosen = self.chosen
        owner, epoch = self.owner, self.log.epoch
        peers = [stage.peer_id for stage in owner.route] or list(PEERS)
        peer = chosen.one_of(peers)
        move_epoch = owner.move.epoch if owner.move is not None else epoch + 1
        at = chosen.one_of([epoch, epoch, epoch, move_epoch, max(0, epoch - 1)])
        start = chosen.below(NEW)
        kind = chosen.one_of((*EVENTS, "again") if self.past else EVENTS)
        match kind:
            case "accept":
                rows = chosen.yes()
                position = chosen.below(len(PROMPT) + NEW + 1)
                return Accepted(epoch=at, position=position, rows=rows)
            case "tokens":
                known = len(self.log.token_ids)
                start = min(start, known) if chosen.yes() else known
                ids = TRUTH[start : start + chosen.below(4)]
                return Arrived(epoch=at, position=len(PROMPT) + start, token_ids=ids)
            case "refuse":
                code = chosen.one_of(CODES)
                return Refused(epoch=at, peer_id=peer, code=code, reason="r")
            case "lose":
                if len(self.dead) < 3 and chosen.yes():
                    self.dead.add(peer)
                    self.holds.pop(peer, None)
                return Lost(epoch=at, peer_id=peer, reason="r")
            case "leave":
                to = chosen.one_of(PEERS) if chosen.yes() else ""
                self.now_s += RELIEF_EVERY_S if to and chosen.yes() else 0.0
                return Leaving(epoch=at, peer_id=peer, to=to)
            case "warm":
                return Warmed(epoch=at)
            case _:
                return chosen.one_of(self.past)

    def calm(self) -> None:
        """From now on everybody does what is asked: the answer must come to its end."""
        for _ in range(200):
            self.now_s += 0.01
            match self.owner.state:
                case OwnerState.OPENING:
                    self.happen(Accepted(epoch=self.log.epoch, position=0))
                case OwnerState.RUNNING:
                    known = len(self.log.token_ids)
                    ids = TRUTH[known : known + 1]
                    position = len(PROMPT) + known
                    self.happen(Arrived(epoch=self.log.epoch, position=position, token_ids=ids))
                case _:
                    return


def live(chosen: Choices, steps: int) -> None:
    """One session's life, and what must hold in the end."""
    world = World(chosen)
    world.perform(world.owner.start(0.0))
    for _ in range(steps):
        if world.owner.state in {OwnerState.DONE, OwnerState.GAVE_UP}:
            break
        world.happen(world.event())
    world.calm()
    owner = world.owner
    if owner.state is OwnerState.GAVE_UP:
        return
    assert owner.state is OwnerState.DONE
    assert tuple(world.delivered) == TRUTH
    # What is still held is what the end closes: the route, and the stages of a move under way.
    closed = {stage.peer_id for stage in (*owner.accepted, *owner.touched)}
    if owner.move is not None:
        closed |= {stage.peer_id for stage in owner.move.route}
    assert set(world.holds) - world.dead <= closed


@pytest.mark.property
@examples(300)
@given(chosen=choices(DECISIONS), steps=st.integers(0, 40))
def test_every_token_once_and_nothing_is_left_reserved(chosen: Choices, steps: int) -> None:
    live(chosen, steps)


@pytest.mark.slow
@pytest.mark.property
@pytest.mark.parametrize("most_steps", [10, 15, 20, 25])
@examples(900)
@given(chosen=choices(DECISIONS), share=st.integers(0, 255))
def test_every_token_once_in_thousands_of_lives(
    most_steps: int, chosen: Choices, share: int
) -> None:
    steps = share * (most_steps + 1) >> 8
    live(chosen, steps)
