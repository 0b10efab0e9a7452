"""Ways to speak the protocols wrongly, and a peer that does."""

import asyncio
from dataclasses import dataclass, replace

from dht.errors import NetworkError
from dht.identity.grant import grant
from dht.messages import codec
from dht.messages.kv import KvCopy, KvPages, KvTaken
from dht.messages.peer import (
    PEER_BOUNDS,
    LayerCheck,
    PlanRequest,
    ProbeData,
    ProbeRequest,
    ReachRequest,
    RecordsFound,
    RecordsRequest,
    RecordStore,
    RecordStored,
    WitnessRequest,
)
from dht.messages.session import (
    ActivationItem,
    Activations,
    Delivered,
    FramePart,
    MigrationReady,
    Ping,
    Pong,
    Prompt,
    RingToken,
    RingTokens,
    RouteStage,
    Sampling,
    SessionAccepted,
    SessionClose,
    SessionFailed,
    SessionOpen,
    SessionRefused,
    Tokens,
    TokensAttach,
)
from dht.transport.interface import (
    HOP_PROTOCOL,
    LAYERS_PROTOCOL,
    PLAN_PROTOCOL,
    PROBE_PROTOCOL,
    REACH_PROTOCOL,
    RECORDS_PROTOCOL,
    SESSION_PROTOCOL,
    TOKENS_PROTOCOL,
    Stream,
    Transport,
)

PROMPT = tuple(range(30))
S = "a" * 32


@dataclass(frozen=True, slots=True)
class Said:
    """A message with its body, as the wrong peer sends it."""

    message: object
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Told:
    """An answer is read; it is of this type, and these words are in it."""

    kind: type
    words: str = ""


@dataclass(frozen=True, slots=True)
class Half:
    """All but the last bytes of a message."""

    message: object


@dataclass(frozen=True, slots=True)
class Silence:
    """Nothing is sent or read for some time."""

    seconds: float


OPEN, RELAYED = "an open of its own", "an open of its own by way of itself"
MISPLACED = "an open for the second hop on a session's stream"
CLOSE = "the end of its stream"
Step = object
"""What it does: a message or one of the above, ``bytes`` as they are, or a list of those."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to be wrong: what is done on a protocol, and what counts it within a time limit.

    ``counted`` is a counter of the stage, or the error that ended the stream; none where the last
    step is the answer that names the refusal.
    """

    name: str
    protocol: str
    steps: tuple[Step, ...]
    counted: str = ""
    limit_s: float = 1.0

    @property
    def ends(self) -> bool:
        """Whether the other side ends the stream."""
        return self.counted.endswith("Error") or self.counted in {
            "malformed",
            "streams_silent",
            "ended",
        }

    @property
    def target(self) -> int:
        """Index of the stage that it is tried on."""
        return -1 if self.protocol in {HOP_PROTOCOL, TOKENS_PROTOCOL} else 0


def rows(session: str, position: int, count: int, body: bytes) -> Said:
    item = ActivationItem(session=session, attempt=0, position=position, tokens=count)
    return Said(Activations(items=(item,), dtype="float32", hidden=1), body)


def part(number: int, offset: int, total: int, body: bytes, *, slow: bool = True) -> Said:
    message = FramePart(number=number, offset=offset, total_bytes=total, slow=slow)
    return Said(message, body)


PROMPTED = Prompt(session=S, attempt=0, position=0, token_ids=PROMPT)
ATTACHED = TokensAttach(session=S, attempt=0, position=0)
CLOSED = SessionClose(session=S, attempt=0)
ACCEPTED = SessionAccepted(session=S, attempt=0)
RING = RingTokens(tokens=(RingToken(session=S, attempt=0, position=9, token_ids=(1,)),))
KV = Said(KvPages(session=S, attempt=0, position=0, tokens=1, dtype="float32"), bytes(8))
TOKENS = Tokens(session=S, attempt=0, position=0, token_ids=(1,))
RECORDS = RecordsRequest(keys=("n/m/nodes",))
FOUND = RecordsFound(records=(), more=False, unix_s=1.0)
CHECK = LayerCheck(nonce=bytes(16), start=0, end=1)
PING, PONG = Ping(nonce=1), Pong(nonce=1)
PLAN = PlanRequest(sha256="0" * 64)
HUGE = (codec.FRAME_BOUNDS.bytes_max + 1).to_bytes(4, "little") + bytes(4)
OLD_PING = (4 + 8).to_bytes(4, "little") + (8).to_bytes(4, "little") + b"\x93\x01\xa4ping\x80"
INNER = codec.encode_frame(part(1, 0, 5, b"x").message, b"x")
SESSION, LAST, HOP = SESSION_PROTOCOL, TOKENS_PROTOCOL, HOP_PROTOCOL
PROBE, REACH, BOOK = PROBE_PROTOCOL, REACH_PROTOCOL, RECORDS_PROTOCOL

ORDER = (
    Way("prompt before the open", SESSION, (PROMPTED,), "malformed"),
    Way("ping before the open", SESSION, (PING,), "malformed"),
    Way("pong without a ping", SESSION, (PONG,), "malformed"),
    Way("pong after an open", SESSION, (OPEN, Told(SessionAccepted), PONG), "malformed"),
    Way("acceptance by the opener", SESSION, (ACCEPTED,), "malformed"),
    Way("close before the open", SESSION, (CLOSED, PROMPTED, CLOSE)),
    Way("attach before the open", LAST, (ATTACHED, Told(SessionFailed, "no such session"))),
    Way("ping before the attach", LAST, (PING,), "malformed"),
    Way("rows before the open", HOP, (
        rows(S, 0, 1, bytes(4)), PING, Told(Pong)), "stale_activations"),
    Way("KV before the open", HOP, (KV, PING, Told(Pong)), "stale_kv"),
    Way("ring tokens before the open", HOP, (RING, PING, Told(Pong)), "stale_inputs"),
    Way("a part that never began", HOP, (part(1, 3, 9, b"abc"),), "malformed"),
    Way("KV asked for no session", SESSION, (
        KvCopy(session=S, attempt=1, to="p"), Told(SessionRefused, "no such session"))),
)  # fmt: skip
REPETITION = (
    Way("open twice on a stream", SESSION, (OPEN, Told(SessionAccepted), OPEN), "malformed"),
    Way("open twice on a hop", HOP, (
        RELAYED, Told(SessionAccepted), RELAYED, Told(SessionRefused, "open already"))),
    Way("attach twice", LAST, (RELAYED, ATTACHED, ATTACHED), "malformed"),
    Way("prompt twice", SESSION, (
        OPEN, Told(SessionAccepted), PROMPTED, PROMPTED, PING, Told(Pong)), "stale_inputs"),
    Way("rows twice", HOP, (
        RELAYED, Told(SessionAccepted), rows(S, 0, 1, bytes(4)), rows(S, 0, 1, bytes(4)),
        PING, Told(Pong)), "stale_activations"),
    Way("a part twice", HOP, (part(1, 0, 9, b"abc"), part(1, 0, 9, b"abc")), "malformed"),
    Way("65 requests for plans", PLAN_PROTOCOL, ([PING] * 65,), "ended", 11),
    Way("65 pings to probe", PROBE, ([PING] * 65,), "ended", 11),
)  # fmt: skip
SILENCES = (
    Way("a session's stream without a word", SESSION, (), "streams_silent", 16),
    Way("a token stream without a word", LAST, (), "streams_silent", 16),
    Way("a hop without a word", HOP, (), "streams_silent", 16),
    Way("plans without a word", PLAN_PROTOCOL, (), "TimeoutError", 61),
    Way("a probe without a word", PROBE, (), "TimeoutError", 61),
    Way("reach without a word", REACH, (), "TimeoutError", 9),
    Way("a layer check without a word", LAYERS_PROTOCOL, (), "TimeoutError", 61),
    Way("records without a word", BOOK, (), "ended", 181),
    Way("half an open", SESSION, (Half(PROMPTED),), "streams_silent", 16),
    Way("half an attach", LAST, (Half(ATTACHED),), "streams_silent", 16),
    Way("half a ring token", HOP, (Half(RING),), "streams_silent", 16),
    Way("half a plan request", PLAN_PROTOCOL, (Half(PLAN),), "TimeoutError", 61),
    Way("half a probe", PROBE, (Half(PING),), "TimeoutError", 61),
    Way("half a reach request", REACH, (Half(ReachRequest(port=1)),), "TimeoutError", 9),
    Way("half a layer check", LAYERS_PROTOCOL, (Half(CHECK),), "TimeoutError", 61),
    Way("half a records request", BOOK, (Half(RECORDS),), "ended", 181),
    Way("an open and no more", SESSION, (OPEN, Told(SessionAccepted)), "streams_silent", 31),
    Way("a hop that opened and rests", HOP, (
        RELAYED, Told(SessionAccepted)), "streams_silent", 121),
    Way("half a frame in parts", HOP, (part(1, 0, 9, b"abc"),), "streams_silent", 61),
    Way("pongs never read", SESSION, (
        OPEN, Told(SessionAccepted), [PING] * 12_000, Silence(70)), "streams_ended", 1),
    Way("pongs of a hop never read", HOP, ([PING] * 12_000, Silence(70)), "streams_ended", 1),
    Way("a probe never read", PROBE, (
        ProbeRequest(size_bytes=PEER_BOUNDS.probe_bytes_max), Silence(30)), "TimeoutError", 1),
)  # fmt: skip
HALF_CLOSED = (
    Way("ended after the open", SESSION, (OPEN, Told(SessionAccepted), CLOSE), "closed"),
    Way("ended within the prompt", SESSION, (
        OPEN, Told(SessionAccepted), Half(PROMPTED), CLOSE), "closed"),
    Way("a hop ended after the open", HOP, (RELAYED, Told(SessionAccepted), CLOSE), "paused"),
)  # fmt: skip
WRONG_WORDS = (
    Way("a frame a byte too long", SESSION, (HUGE,), "malformed"),
    Way("an attach a byte too long", LAST, (HUGE,), "malformed"),
    Way("a version before this", HOP, (OLD_PING,), "malformed"),
    Way("an open for the second hop", SESSION, (MISPLACED,), "malformed"),
    Way("rows of another length", HOP, (rows(S, 0, 9, bytes(4)),), "malformed"),
    Way("rows of half a number", HOP, (rows(S, 0, 1, bytes(3)),), "malformed"),
    Way("a part within a part", HOP, (part(1, 0, len(INNER), INNER),), "malformed"),
    Way("nine frames in parts", HOP, (
        [part(number, 0, 9, b"abc") for number in range(9)],), "malformed"),
    Way("parts that contradict", HOP, (
        part(1, 0, 9, b"abc"), part(1, 3, 8, b"abc")), "malformed"),
    Way("probes a byte too long", PROBE, (
        ProbeRequest(size_bytes=PEER_BOUNDS.probe_bytes_max), [Told(ProbeData)] * 256,
        ProbeRequest(size_bytes=1)), "MalformedError"),
    Way("a check of five layers", LAYERS_PROTOCOL, (
        LayerCheck(nonce=bytes(16), start=0, end=5),), "MalformedError"),
    Way("a record that is none", BOOK, (
        RecordStore(record=b"x"), Told(RecordStored, "no signed record"))),
    Way("records under no key", BOOK, (RecordsRequest(keys=("x",)),), "RecordError"),
)  # fmt: skip
WRONG_PROTOCOL = tuple(
    Way(
        f"{type(getattr(message, 'message', message)).__name__} on {protocol.split('/')[2]}",
        protocol,
        (message,),
        counted,
    )
    for protocol, messages, counted in (
        (SESSION, (ATTACHED, RING, rows(S, 0, 1, bytes(4)), KV, PLAN, RECORDS), "malformed"),
        (LAST, (PROMPTED, TOKENS, RING, RECORDS, CLOSED), "malformed"),
        (HOP, (PROMPTED, ATTACHED, TOKENS, ACCEPTED, Delivered(total_bytes=1, slow_bytes=1),
               KvTaken(session=S, attempt=0, position=1), MigrationReady(session=S, attempt=0),
               WitnessRequest(peer_id="p"), PONG), "malformed"),
        (PLAN_PROTOCOL, (PONG, CLOSED, RECORDS, ProbeRequest(size_bytes=1)), "MalformedError"),
        (PROBE, (PONG, CLOSED, PLAN, ReachRequest(port=1)), "MalformedError"),
        (REACH, (PING, CLOSED, RECORDS), "MalformedError"),
        (LAYERS_PROTOCOL, (PING, CLOSED, RECORDS), "MalformedError"),
        (BOOK, (PONG, CLOSED, PLAN, FOUND), "MalformedError"),
    )
    for message in messages
)  # fmt: skip
WAYS = (*ORDER, *REPETITION, *SILENCES, *HALF_CLOSED, *WRONG_WORDS, *WRONG_PROTOCOL)
QUICK_WAYS = tuple(
    way
    for way in WAYS
    if way.limit_s <= 31 and not any(isinstance(step, Silence) for step in way.steps)
)
"""Those that need no patience."""


class WrongPeer:
    """Performs the steps of one way on one stream."""

    def __init__(
        self, evil: Transport, route: tuple[RouteStage, ...], fingerprint: str, session: str = S
    ) -> None:
        """``evil`` speaks to a peer of the swarm over ``route``."""
        self.session = session
        open_ = SessionOpen(
            session=session,
            attempt=0,
            client=evil.peer_id,
            fingerprint=fingerprint,
            route=route,
            hop=0,
            prompt_tokens=len(PROMPT),
            max_new_tokens=50,
            sampling=Sampling(),
        )
        first_is_it = (replace(route[0], peer_id=evil.peer_id), *route[1:])
        self.own = grant(open_, evil.sign, evil.now())
        relayed = grant(replace(open_, route=first_is_it), evil.sign, evil.now())
        self.relayed = replace(relayed, hop=1)
        self.stream: Stream

    def _encoded(self, message: object, body: bytes = b"") -> bytes:
        return codec.encode_frame(message, body).replace(S.encode(), self.session.encode())

    async def do(self, step: Step) -> None:
        """Perform a step; raises AssertionError where the answer is another one."""
        match step:
            case list():
                for each in step:
                    await self.do(each)
            case Told(kind=kind, words=words):
                reply = (await codec.read_frame(self.stream)).message
                assert isinstance(reply, kind), reply
                assert words in str(reply)
            case Half(message=message):
                self.stream.write(self._encoded(message)[:-1])
            case Silence(seconds=seconds):
                await asyncio.sleep(seconds)
            case bytes():
                self.stream.write(step)
            case Said(message=message, body=body):
                self.stream.write(self._encoded(message, body))
            case _ if step is CLOSE:
                await self.stream.close()
            case _ if step is OPEN:
                self.stream.write(self._encoded(self.own))
            case _ if step is RELAYED:
                self.stream.write(self._encoded(self.relayed))
            case _ if step is MISPLACED:
                self.stream.write(self._encoded(replace(self.own, hop=1)))
            case _:
                self.stream.write(self._encoded(step))


async def ended(stream: Stream) -> None:
    """Read until the other side has ended the stream."""
    try:
        while True:
            await stream.read_exactly(1)
    except NetworkError:
        return
