"""A route of stage sessions under a network that loses, repeats and reorders frames, and crashes.

The machines are the real ones, the client's log included; what stands between them is a model: the
hidden state of a token is its id, an engine runs a chunk at once, and the last stage samples from a
hash of all ids that reached it in order. The owner opens the next attempt after a crash and where
nothing moves any more. The first stage drafts, rightly or not, and each stage may run fewer of the
drafts. An answer is right only if every stage ran every row once, in order, on the KV that it
really has, and took back the rows that were drafted in vain.
"""

from dataclasses import dataclass, field

import torch
from hypothesis import given
from hypothesis import strategies as st

from client.answer.answer import AnswerLog, AnswerRequest
from dht.messages.session import Sampling, SessionOpen
from dht.messages.types import RouteStage
from node.engine.work_item import WorkItem
from node.sessions.life import Accepted, Resend, Rewind, step
from node.sessions.session import StageSession, StageState
from tests.choices import Choices, choices
from tests.examples import examples
from tests.unit.records import MODEL

LAYERS = 6
PROMPT = (11, 12, 13, 14, 15)
NEW = 12
DRAFTS = 4
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
WHOLE = PROMPT + TRUTH
HAPPENINGS = ("deliver",) * 6 + ("drop", "repeat", "crash", "forget", "open")
DECISIONS = 800
"""More than a life takes."""


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
    drafts: tuple[int, ...] = ()


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
                draft_tokens=DRAFTS,
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
            own = session.next_position
            logged = asked >= stage.logged_from and own <= len(stage.kv)
            event = Accepted(position=None if session.is_last else asked, logged=logged)
            for effect in step(session, event):
                match effect:
                    case Rewind(position=position):
                        session.rewind(position)
                    case Resend(start=start, end=end):
                        assert start >= stage.logged_from, "rows that no log has"
                        self.send(hop, start, tuple(stage.kv[start:end]))
            assert session.state is StageState.ACTIVE
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

    def send(
        self, hop: int, position: int, ids: tuple[int, ...], drafts: tuple[int, ...] = ()
    ) -> None:
        """Rows to the next stage, cut where its prompt ends."""
        end = self.log_prompt(hop)
        last = position + len(ids)
        for at, to in ((position, min(last, end)), (max(position, end), last)):
            if part := ids[at - position : max(at, to) - position]:
                self.frames.append(Frame(hop + 1, self.log.attempt, at, part, drafts))

    def log_prompt(self, hop: int) -> int:
        stage = self.stages[hop]
        assert stage is not None
        return stage.session.open.prompt_tokens

    def push(self) -> None:
        """The first stage runs what it can."""
        while (stage := self.stages[0]) is not None:
            session = stage.session
            size = 1 + self.chosen.below(4)
            chunk = session.next_chunk(size, self.drafts(session))
            if chunk is None:
                return
            chunk = self.with_room(session, chunk)
            assert chunk.token_ids is not None
            self.run(0, chunk, chunk.token_ids)

    def drafts(self, session: StageSession) -> tuple[int, ...]:
        """As many as may be, each wrong now and then."""
        most, at = session.drafts_most, len(session.inputs) - len(PROMPT)
        right = TRUTH[at : at + (self.chosen.below(most + 1) if most else 0)]
        return tuple(n + (self.chosen.below(4) == 0) for n in right)

    def with_room(self, session: StageSession, chunk: WorkItem) -> WorkItem:
        """The chunk with as many of its drafts as there is room for."""
        if not chunk.drafts or self.chosen.below(3):
            return chunk
        return session.shortened(chunk, self.chosen.below(1 + len(chunk.drafts)))

    def run(self, hop: int, chunk: WorkItem, ids: tuple[int, ...]) -> None:
        """What the engine and the data flow do with a chunk."""
        stage = self.stages[hop]
        assert stage is not None
        session = stage.session
        assert chunk.position <= len(stage.kv), "a row was skipped"
        stage.kv[chunk.position :] = ids
        session.in_flight = False
        certain = chunk.position + chunk.tokens - len(chunk.drafts)
        run = [] if chunk.sampling is None else [sample(stage.kv[:certain])]
        for at, draft in enumerate(chunk.drafts, start=1):
            if not run or draft != run[-1]:
                break
            run.append(sample(stage.kv[: certain + at]))
        session.ran(chunk, len(run))
        assert tuple(stage.kv[: session.done_position]) == WHOLE[: session.done_position]
        if not session.is_last:
            skip = max(0, session.send_position - chunk.position)
            if ids[skip:]:
                self.send(hop, chunk.position + skip, ids[skip:], chunk.drafts)
        elif run and session.finish_reason is None:
            self.take_sampled(session, run)

    def take_sampled(self, session: StageSession, run: list[int]) -> None:
        """At the last stage: log the new tokens, and send them on."""
        attempt, position = session.open.attempt, session.open.prompt_tokens + len(session.sampled)
        for token_id in run:
            session.add_sampled(token_id)
            if session.finish_reason is not None:
                break
        ids = session.sampled_from(position)
        self.delivered += self.log.accept(attempt=attempt, position=position, token_ids=ids)
        assert tuple(self.delivered) == TRUTH[: len(self.delivered)]
        if session.finish_reason is None:
            if session.is_first:
                assert session.add_inputs(position, ids)
            else:
                self.frames.append(Frame(0, attempt, position, ids))

    def deliver(self, frame: Frame) -> None:
        stage = self.stages[frame.to]
        if stage is None or stage.session.open.attempt != frame.attempt:
            return
        if frame.to == 0:
            stage.session.add_accepted(frame.position, frame.ids)
            self.push()
            return
        rows = torch.empty(len(frame.ids), 0)
        chunk = stage.session.take_rows(frame.position, rows, frame.drafts)
        if chunk is not None:
            chunk = self.with_room(stage.session, chunk)
            self.run(frame.to, chunk, frame.ids[: chunk.tokens])

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


@examples(400)
@given(chosen=choices(DECISIONS), count=st.integers(1, 4), steps=st.integers(0, 40))
def test_every_token_once_whatever_the_network_does(
    chosen: Choices, count: int, steps: int
) -> None:
    live(chosen, count, steps)
