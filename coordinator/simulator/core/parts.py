"""The simulator's objects: sessions, their pieces, hops, links and peers.

They are mutable and slotted: a simulated minute touches millions of them.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from coordinator.policies.batching.scheduler import LIMIT_ROWS, Scheduler, limits_of
from coordinator.policies.failure.detector import StepTimes
from coordinator.policies.links.chunk_sizer import ChunkSizer
from coordinator.policies.links.scheduler import TrafficClass
from coordinator.simulator.core.profiles import NOTHING, PeerProfile, Points, interpolated
from coordinator.simulator.core.trace import Request

PREFILL_TABLE_TOKENS = 8192
DECODE_TABLE_TOKENS = 1024
NEVER_S = float("inf")

Stage = tuple[str, int, int]
"""A peer, and the half-open range of layers that it runs."""


class SimulatedSession:
    """One simulated session: prompt first, then a token per turn of the ring."""

    __slots__ = (
        "answer_s",
        "arrival_s",
        "client",
        "decode",
        "entry",
        "fed_tokens",
        "hops",
        "input_tokens",
        "issued_s",
        "left_tokens",
        "number",
        "output_tokens",
        "prompt",
        "prompting",
        "replays",
        "stages",
        "tokens_in_kv",
        "unfed_tokens",
        "urgent",
        "waits",
        "warming",
    )

    def __init__(self, number: int, request: Request, arrival_s: float) -> None:
        self.number = number
        self.input_tokens = request.input_tokens
        self.output_tokens = request.output_tokens
        self.left_tokens = request.output_tokens
        self.urgent = request.urgent
        self.arrival_s = arrival_s
        self.client = 0
        self.issued_s = arrival_s
        """When the present pass started."""
        self.prompt: list[SimulatedPiece] = []
        """The pieces of the prompt or replay under way."""
        self.prompting = True
        """Whether a prompt or replay is under way."""
        self.fed_tokens = 0
        self.unfed_tokens = 0
        """Tokens of the prompt that the first stage has not begun."""
        self.waits = False
        """Whether the next token waits at the last stage for KV."""
        self.warming = False
        """Whether the prompt under way only fills new stages, and nobody waits for it."""
        self.tokens_in_kv = 0
        """Tokens whose pass over all layers has ended."""
        self.replays = 0
        self.stages: list[Stage] = []
        self.entry: Any = None
        """The first hop of the route."""
        self.hops: tuple[SimulatedHop, ...] = ()
        self.answer_s = 0.0
        """Time from the last stage to the client."""
        self.decode = SimulatedPiece(self, 1, prefill=False)
        """The piece of the decode token; there is never more than one at a time."""


class SimulatedPiece:
    """A piece: tokens of a session that travel together, a prompt's chunk or a decode token.

    It is an item of work for :class:`coordinator.policies.batching.scheduler.Scheduler`.
    """

    __slots__ = (
        "arrives_s",
        "background",
        "computed_s",
        "dead",
        "decodes",
        "final",
        "hop",
        "position",
        "prefill",
        "queued_s",
        "sent_s",
        "session",
        "tokens",
        "urgent",
        "waited_s",
    )

    def __init__(
        self, session: SimulatedSession, tokens: int, *, final: bool = True, prefill: bool = True
    ) -> None:
        self.session = session
        self.tokens = tokens
        self.final = final
        """Whether the pass of this piece yields the session's next token."""
        self.prefill = prefill
        self.decodes = tokens == 1
        """Whether the piece is one token; nothing is drafted on paper."""
        self.background = False
        """Whether nobody waits for the piece, as in a planned move."""
        self.urgent = session.urgent
        self.dead = False
        """Whether the session left the route: the piece yields nothing."""
        self.hop: Any = None
        """Where the piece is, or is sent to."""
        self.position = 0
        """Tokens of the prompt before the piece."""
        self.queued_s = 0.0
        """When the piece reached the peer."""
        self.sent_s = 0.0
        """When the latest link began to carry the piece."""
        self.arrives_s = 0.0
        self.computed_s = 0.0
        """Time of the steps that ran the piece in this turn of the ring."""
        self.waited_s = 0.0
        """Time for which the piece waited for them."""

    @property
    def ring_s(self) -> tuple[float, float] | None:
        """What the piece took at the stages before the last one."""
        hop = self.hop
        return (self.computed_s, self.waited_s) if hop.last and not hop.first else None


class SimulatedWire(Protocol):
    """The sender of one directed link, or of all links that share an uplink."""

    stalled: list[SimulatedSession]
    """Sessions whose prompts wait until less is queued here."""

    @property
    def queued_bytes(self) -> float:
        """Bytes that have not left."""
        ...

    def offer(
        self,
        link: "SimulatedLink",
        frame: list[SimulatedPiece],
        size_bytes: float,
        traffic: TrafficClass,
    ) -> None:
        """Queue a frame of pieces for a link; the receiver gets them together."""
        ...


class SimulatedLink:
    """A directed link with its sender.

    Where its sender's uplink is shared and faster than the way to the receiver, or several peers
    share a connection at either end, frames pass several, one behind the other: ``onward``.
    """

    __slots__ = (
        "busy_s",
        "bytes_per_s",
        "latency_s",
        "onward",
        "pieces",
        "source",
        "target",
        "waited_s",
        "wire",
    )

    def __init__(
        self,
        source: str,
        target: "SimulatedPeer | None",
        bytes_per_s: float,
        latency_s: float,
        wire: SimulatedWire,
        onward: "SimulatedLink | None" = None,
    ) -> None:
        self.source = source
        self.target = target
        """The receiving peer; None: the clients."""
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.busy_s = 0.0
        self.waited_s = 0.0
        self.pieces = 0
        """Number of frames."""
        self.wire = wire
        self.onward = onward

    @property
    def narrowest(self) -> "SimulatedLink":
        """The part of the way that carries least."""
        return min(self.parts, key=lambda part: part.bytes_per_s)

    @property
    def parts(self) -> "Iterator[SimulatedLink]":
        """The parts of the way, in the order in which frames pass them."""
        part: SimulatedLink | None = self
        while part is not None:
            yield part
            part = part.onward

    def send(self, frame: list[SimulatedPiece], size_bytes: float, traffic: TrafficClass) -> None:
        """Queue a frame for the other end."""
        self.pieces += 1
        self.busy_s += size_bytes / self.narrowest.bytes_per_s
        self.wire.offer(self, frame, size_bytes, traffic)

    def pass_on(self, left: tuple[list[SimulatedPiece], float, TrafficClass]) -> None:
        """Send a frame, of some bytes and a class, that has left the uplink onward."""
        assert self.onward is not None  # noqa: S101 - only such links call it
        self.onward.wire.offer(self.onward, *left)


class SimulatedHop:
    """One stage of a session's route: a peer, its layers, and the link that it leaves by.

    ``following`` of the last stage is the first one: the ring.
    """

    __slots__ = ("end", "first", "following", "last", "link", "peer", "start")

    def __init__(self, peer: "SimulatedPeer", start: int, end: int) -> None:
        self.peer = peer
        self.start = start
        self.end = end
        self.first = False
        self.last = False
        self.link: SimulatedLink | None = None
        """None: the next stage is the same peer."""
        self.following: SimulatedHop = self


class SimulatedPeer:
    """A peer that holds layers ``[start, end)`` and runs one step at a time."""

    __slots__ = (
        "alive",
        "arrived_tokens",
        "began_s",
        "busy",
        "busy_s",
        "copy_s_per_token",
        "decode_context_s",
        "decode_s",
        "decode_waits",
        "decodes_only",
        "end",
        "kv_capacity",
        "kv_peak",
        "layer_factor",
        "layers",
        "name",
        "partial",
        "prefill_context_s",
        "prefill_s",
        "rows",
        "running",
        "scheduler",
        "sessions",
        "sizer",
        "slowdown",
        "start",
        "steps",
        "tokens",
    )

    def __init__(
        self, name: str, start: int, end: int, profile: PeerProfile, model_layers: int
    ) -> None:
        self.name = name
        self.start = start
        self.end = end
        self.layers = max(1, end - start)
        self.prefill_s = interpolated(profile.prefill, PREFILL_TABLE_TOKENS)
        self.decode_s = list(interpolated(profile.decode, DECODE_TABLE_TOKENS))
        self.decode_s[1] *= profile.single_decode_factor
        self.prefill_context_s = _table(profile.prefill_context, PREFILL_TABLE_TOKENS)
        self.decode_context_s = _table(profile.decode_context, DECODE_TABLE_TOKENS)
        self.layer_factor = profile.stretch_of(self.layers)
        self.copy_s_per_token = profile.copy_s_per_token
        self.kv_capacity = profile.kv.of(start, end, model_layers)
        self.kv_peak = 0
        limits = limits_of(
            {rows: self.prefill_s[rows] for rows in LIMIT_ROWS},
            profile.layers_max or self.layers,
            decode_s={rows: self.decode_s[rows] for rows in LIMIT_ROWS},
        )
        self.scheduler: Scheduler[SimulatedPiece] = Scheduler(limits)
        self.sizer = ChunkSizer()
        self.decode_waits = StepTimes()
        self.sessions = 0
        self.partial = False
        """Whether a session runs only some of the layers."""
        self.busy = False
        self.alive = True
        self.slowdown = 1.0
        self.running: Sequence[SimulatedPiece] = ()
        self.began_s = 0.0
        self.rows = 0
        self.decodes_only = False
        self.arrived_tokens = 0
        self.busy_s = 0.0
        self.steps = 0
        self.tokens = 0

    @property
    def tokens_per_step(self) -> float:
        """Mean number of rows of a step."""
        return self.tokens / max(1, self.steps)

    def layer_s(
        self, decodes: int, context: int, prefill_tokens: int, prefill_context: float
    ) -> float:
        """Seconds of a layer for a step with that many rows.

        ``context`` is the sum of the decodes' contexts, ``prefill_context`` the mean context before
        the prefill rows. A step with few prefill rows takes at least a decode's time: both read the
        weights.
        """
        took_s = 0.0
        if decodes:
            took_s = _at(self.decode_s, decodes)
            if self.decode_context_s:
                took_s += _at(self.decode_context_s, decodes) * context / decodes
        if prefill_tokens:
            took_s += _at(self.prefill_s, prefill_tokens)
            if self.prefill_context_s:
                took_s += _at(self.prefill_context_s, prefill_tokens) * prefill_context
            took_s = max(took_s, self.decode_s[2])
        return took_s


def _table(points: Points, tokens_max: int) -> Sequence[float]:
    return interpolated(points, tokens_max) if points else ()


def _at(table: Sequence[float], count: int) -> float:
    """The table's value, extrapolated beyond its end."""
    if count < len(table):
        return table[count]
    return table[-1] + (count - len(table) + 1) * (table[-1] - table[-2])


NOBODY = SimulatedPeer("nobody", 0, 1, NOTHING, 1)
NOWHERE = SimulatedHop(NOBODY, 0, 0)
"""The hop of a piece that belongs to no route."""
