"""A route of stage sessions under a network that loses, repeats and reorders frames, and crashes.

The machines are the real ones, the client's log included; what stands between them is a model: the
hidden state of a token is its id, an engine runs a chunk at once, and the last stage samples from a
hash of all ids that reached it in order. The owner opens the next attempt after a crash and where
nothing moves any more. An answer is right only if every stage ran every row once, in order, on the
KV that it really has.
"""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from client.answer.generation import AnswerLog, AnswerRequest
from dht.messages.session import Sampling, SessionOpen
from dht.messages.types import RouteStage
from node.engine.work_item import WorkItem
from node.sessions.session import StageEvent, StageSession, resume_at
from tests.choices import Choices, choices
from tests.examples import examples
from tests.unit.records import MODEL

LAYERS = 6
PROMPT = (11, 12, 13, 14, 15)
NEW = 6
VOCAB = 97


def sample(ids: list[int]) -> int:
    state = 7
    for token_id in ids:
        state = (state * 1_000_003 + token_id + 1) % (1 << 61)
    return state % VOCAB


def truth() -> tuple[int, ...]:
    ids = list(PROMPT)
    for _ in range(NEW):
        ids.append(sample(ids))
    return tuple(ids[len(PROMPT) :])


TRUTH = truth()
HAPPENINGS = ("deliver",) * 6 + ("drop", "repeat", "crash", "forget", "open")
DECISIONS = 200
"""More than a life takes: 160 at most, of 1,500."""


@dataclass(slots=True)
class Stage:
    """What one peer holds of the session."""

    session: StageSession
    kv: list[int] = field(default_factory=list)
    """Ids whose rows were run, by position."""
    logged_from: int = 0
    """Rows before it are not in the log any more."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Rows for stage ``to``; for stage 0, a token of the ring."""

    to: int
    attempt: int
    position: int
    ids: tuple[int, ...]


class Route:
    """One session over ``count`` stages, its owner and the frames on their way."""

    def __init__(self, chosen: Choices, count: int) -> None:
        self.chosen = chosen
        cuts = [round(LAYERS * i / count) for i in range(count + 1)]
        self.route = tuple(
            RouteStage(peer_id=f"p{i}", start=cuts[i], end=cuts[i + 1]) for i in range(count)
        )
        self.log = AnswerLog(
            request=AnswerRequest(
                model=MODEL, prompt_ids=PROMPT, max_new_tokens=NEW, sampling=Sampling()
            )
        )
        self.stages: list[Stage | None] = [None] * count
        self.frames: list[Frame] = []
        self.delivered: list[int] = []
        self.reserved: list[int] = [0] * count
        """Reservations that each peer holds for the session."""
        self.open()

    def open(self) -> None:
        """The owner's next attempt, all the way down and up again."""
        log = self.log
        log.attempt += 1
        for hop in range(len(self.route)):
            open_ = SessionOpen(
                session="s" * 16,
                attempt=log.attempt,
                client="client",
                fingerprint="f",
                route=self.route,
                hop=hop,
                prompt_tokens=len(log.replay_ids),
                max_new_tokens=log.remaining_tokens,
                sampling=log.request.sampling,
                answered=len(log.token_ids),
            )
            before = self.stages[hop]
            if before is not None and before.session.can_take_over(open_):
                before.session = before.session.take_over(open_)
            else:
                self.reserved[hop] += 1 if before is None else 0
                self.stages[hop] = self.begun(open_)
        asked = 0
        for hop in reversed(range(len(self.route))):
            stage = self.stages[hop]
            assert stage is not None
            session = stage.session
            if not session.is_last:
                own = session.next_position
                logged = asked >= stage.logged_from and own <= len(stage.kv)
                resume = resume_at(asked, own, logged=logged)
                session.send_position = asked
                if resume.own_position < own:
                    session.rewind(resume.own_position)
                elif resume.resend_from < own:
                    assert resume.resend_from >= stage.logged_from, "rows that no log has"
                    self.send(hop, resume.resend_from, tuple(stage.kv[resume.resend_from : own]))
            assert session.on(StageEvent.ACCEPTED)
            asked = session.needs_from
        self.feed(asked)

    def begun(self, open_: SessionOpen) -> Stage:
        """A stage that has nothing of the session, but perhaps what another left there."""
        kept = self.chosen.below(open_.prompt_tokens) if self.chosen.below(2) else 0
        session = StageSession(open=open_)
        session.start_at(kept)
        return Stage(session, kv=list(self.log.replay_ids[:kept]), logged_from=kept)

    def feed(self, position: int) -> None:
        first, known = self.stages[0], self.log.replay_ids
        assert first is not None
        if position < len(known):
            assert first.session.add_inputs(position, known[position:])
        self.push()
        unknown = 0 if first.session.told else first.session.unknown
        told = self.chosen.below(1 + unknown)  # the ids before come last, if at all
        if told:
            assert first.session.add_inputs(0, known[:told])

    def send(self, hop: int, position: int, ids: tuple[int, ...]) -> None:
        """Rows to the next stage, cut where its prompt ends."""
        end = self.log_prompt(hop)
        for at, to in ((position, min(position + len(ids), end)), (max(position, end), None)):
            part = ids[at - position : None if to is None else to - position]
            if part and at >= position:
                self.frames.append(Frame(hop + 1, self.log.attempt, at, part))

    def log_prompt(self, hop: int) -> int:
        stage = self.stages[hop]
        assert stage is not None
        return stage.session.open.prompt_tokens

    def push(self) -> None:
        """The first stage runs what it can."""
        while (stage := self.stages[0]) is not None:
            chunk = stage.session.next_chunk(1 + self.chosen.below(4))
            if chunk is None:
                return
            assert chunk.token_ids is not None
            self.run(0, chunk, chunk.token_ids)

    def run(self, hop: int, chunk: WorkItem, ids: tuple[int, ...]) -> None:
        """What the engine and the data flow do with a chunk."""
        stage = self.stages[hop]
        assert stage is not None
        session = stage.session
        assert chunk.position <= len(stage.kv), "a row was skipped"
        stage.kv[chunk.position :] = ids
        session.in_flight = False
        session.done_position = chunk.position + chunk.tokens
        if not session.is_last:
            skip = max(0, session.send_position - chunk.position)
            if ids[skip:]:
                self.send(hop, chunk.position + skip, ids[skip:])
        elif chunk.sampling is not None and session.finish_reason is None:
            token_id = sample(stage.kv)
            position = session.add_sampled(token_id)
            self.take_token(session.open.attempt, position, token_id)
            if session.finish_reason is None:
                if session.is_first:
                    session.add_inputs(position, (token_id,))
                else:
                    self.frames.append(Frame(0, session.open.attempt, position, (token_id,)))

    def take_token(self, attempt: int, position: int, token_id: int) -> None:
        self.delivered += self.log.accept(attempt=attempt, position=position, token_ids=(token_id,))
        assert tuple(self.delivered) == TRUTH[: len(self.delivered)]

    def deliver(self, frame: Frame) -> None:
        stage = self.stages[frame.to]
        if stage is None or stage.session.open.attempt != frame.attempt:
            return
        if frame.to == 0:
            stage.session.add_inputs(frame.position, frame.ids)
            self.push()
            return
        chunk = stage.session.take_rows(frame.position, torch.empty(len(frame.ids), 0))
        if chunk is not None:
            self.run(frame.to, chunk, frame.ids)

    @property
    def done(self) -> bool:
        return self.log.finish_reason is not None

    def happen(self) -> None:
        """Something that the network or a peer may do."""
        what = self.chosen.one_of(HAPPENINGS)
        at = self.chosen.below(len(self.frames)) if self.frames else None
        hop = self.chosen.below(len(self.stages))
        match what:
            case "deliver" if at is not None:
                self.deliver(self.frames.pop(at))
            case "drop" if at is not None:
                self.frames.pop(at)
            case "repeat" if at is not None:
                self.frames.append(self.frames[at])
            case "crash":
                self.stages[hop], self.reserved[hop] = None, 0
                self.open()
            case "forget" if (stage := self.stages[hop]) is not None:
                stage.logged_from = len(stage.kv)
            case "open":
                self.open()

    def calm(self) -> None:
        """From now on frames come in order; where nothing moves, the owner opens again."""
        for _ in range(200):
            if self.done:
                return
            if self.frames:
                self.deliver(self.frames.pop(0))
            else:
                self.open()


def live(chosen: Choices, count: int, steps: int) -> None:
    """One session's life, and what must hold in the end."""
    route = Route(chosen, count)
    for _ in range(steps):
        if route.done:
            break
        route.happen()
    route.calm()
    assert route.done, "the answer came to no end"
    assert tuple(route.delivered) == TRUTH, "each token exactly once"
    assert all(held <= 1 for held in route.reserved), "reserved twice"


@pytest.mark.property
@examples(200)
@given(chosen=choices(DECISIONS), count=st.integers(1, 4), steps=st.integers(0, 40))
def test_every_token_once_whatever_the_network_does(
    chosen: Choices, count: int, steps: int
) -> None:
    live(chosen, count, steps)


@pytest.mark.slow
@pytest.mark.property
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@examples(1500)
@given(chosen=choices(DECISIONS), steps=st.integers(0, 40))
def test_every_token_once_in_thousands_of_lives(count: int, chosen: Choices, steps: int) -> None:
    live(chosen, count, steps)
