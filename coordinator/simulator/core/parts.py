"""The simulator's objects: sessions, their pieces, hops, links and peers.

They are mutable and slotted: a simulated minute touches millions of them.
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from coordinator.simulator.core.profiles import NOTHING, PeerProfile, StepLimits, interpolated
from coordinator.simulator.core.trace import Request

PREFILL_TABLE_TOKENS = 8192
DECODE_TABLE_TOKENS = 1024
NEVER_S = float("inf")


class SimulatedWire(Protocol):
    """A link with a scheduler of its own."""

    def offer(self, piece: "SimulatedChunk", hop: "SimulatedHop") -> None:
        """Queue a piece that leaves ``hop``."""


class SimulatedLink:
    """A directed link that carries one piece at a time, first come, first served.

    Since pieces are served in order of arrival, the arrival of each piece at the far end is known
    when it is sent, and the link needs no events of its own.
    """

    __slots__ = (
        "arrivals",
        "busy_s",
        "bytes_per_s",
        "free_s",
        "laden",
        "latency_s",
        "pieces",
        "source",
        "target",
        "token_bytes",
        "token_s",
        "waited_s",
        "wire",
    )

    def __init__(
        self,
        source: str,
        target: "SimulatedPeer",
        bytes_per_s: float,
        latency_s: float,
        token_bytes: float,
    ) -> None:
        self.source = source
        self.target = target
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.token_bytes = token_bytes
        self.token_s = token_bytes / bytes_per_s
        self.free_s = 0.0
        self.arrivals: deque[SimulatedChunk] = deque()
        """Pieces under way or waiting to be read, in order of arrival."""
        self.laden = 0
        """Number of pieces in ``arrivals`` that are more than one decode token."""
        self.busy_s = 0.0
        self.waited_s = 0.0
        self.pieces = 0
        self.wire: SimulatedWire | None = None
        """The sender under another link policy; None: first come, first served."""


class SimulatedSegment:
    """The layers of a peer between two points of entry; they always run together."""

    __slots__ = ("end", "prefills", "queue", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.queue: list[SimulatedChunk] = []
        """Pieces that wait to enter here, in order of arrival."""
        self.prefills = 0
        """Number of prefill pieces in ``queue``."""


class SimulatedPeer:
    """A peer that holds layers ``[start, end)`` and runs one batch at a time."""

    __slots__ = (
        "alive",
        "arrived_tokens",
        "at",
        "busy",
        "busy_s",
        "copy_s_per_token",
        "decode_s",
        "end",
        "inbound",
        "kv_capacity",
        "kv_peak",
        "kv_used",
        "limits",
        "name",
        "prefill_s",
        "running",
        "running_prefills",
        "segments",
        "slowdown",
        "stalled_until_s",
        "start",
        "step_least_s",
        "steps",
        "tokens",
        "wake_s",
    )

    def __init__(
        self, name: str, start: int, end: int, profile: PeerProfile, entries: Sequence[int]
    ) -> None:
        self.name = name
        self.start = start
        self.end = end
        bounds = sorted({start, *(entry for entry in entries if start < entry < end)})
        self.segments = [
            SimulatedSegment(a, b) for a, b in zip(bounds, [*bounds[1:], end], strict=True)
        ]
        self.limits: StepLimits = profile.limits_of(max(1, end - start))
        self.prefill_s = interpolated(profile.prefill, PREFILL_TABLE_TOKENS)
        self.decode_s = list(interpolated(profile.decode, DECODE_TABLE_TOKENS))
        self.decode_s[1] *= profile.single_decode_factor
        self.copy_s_per_token = profile.copy_s_per_token
        self.kv_capacity = profile.kv_of(max(1, end - start))
        self.kv_used = 0
        self.kv_peak = 0
        self.inbound: list[SimulatedLink] = []
        self.at = 0
        self.busy = False
        self.alive = True
        self.wake_s = NEVER_S
        self.slowdown = 1.0
        self.step_least_s = 0.0
        """Minimum time per layer of a step with a prompt."""
        self.stalled_until_s = 0.0
        self.running: list[SimulatedChunk] = []
        self.running_prefills = 0
        self.arrived_tokens = 0
        self.busy_s = 0.0
        self.steps = 0
        self.tokens = 0

    def segment_at(self, layer: int) -> SimulatedSegment:
        """The segment that starts at ``layer``; ValueError when none does."""
        for segment in self.segments:
            if segment.start == layer:
                return segment
        raise ValueError(f"{self.name} cannot be entered at layer {layer}")

    def enter_at(self, layer: int) -> None:
        """Make ``layer`` a point of entry, if it lies inside the peer's layers."""
        for index, segment in enumerate(self.segments):
            if segment.start < layer < segment.end:
                self.segments.insert(index + 1, SimulatedSegment(layer, segment.end))
                segment.end = layer
                # A batch that runs here runs to the old end, so it continues after the new segment.
                if self.at > index or (self.at == index and self.busy):
                    self.at += 1
                return

    def decode_time(self, count: int) -> float:
        """Seconds per layer for ``count`` decodes."""
        table = self.decode_s
        if count < len(table):
            return table[count]
        return table[-1] + (count - len(table) + 1) * (table[-1] - table[-2])

    def prefill_time(self, tokens: int) -> float:
        """Seconds per layer for ``tokens`` prefill tokens."""
        table = self.prefill_s
        if tokens < len(table):
            return table[tokens]
        return table[-1] + (tokens - len(table) + 1) * (table[-1] - table[-2])


class SimulatedSession:
    """One simulated session: prompt first, then a token per turn of the ring."""

    __slots__ = (
        "arrival_s",
        "decode",
        "entry",
        "first_token_s",
        "input_tokens",
        "issued_s",
        "left_tokens",
        "number",
        "output_tokens",
        "prompt",
        "replays",
        "stages",
        "tokens_in_kv",
        "urgent",
    )

    def __init__(self, number: int, request: Request, arrival_s: float) -> None:
        self.number = number
        self.input_tokens = request.input_tokens
        self.output_tokens = request.output_tokens
        self.left_tokens = request.output_tokens
        self.urgent = request.urgent
        self.arrival_s = arrival_s
        self.issued_s = arrival_s
        """When the present pass started at the clients."""
        self.first_token_s = NEVER_S
        self.prompt: list[SimulatedChunk] = []
        """The chunks of the prompt or replay under way."""
        self.tokens_in_kv = 0
        """Tokens whose pass over all layers has ended."""
        self.replays = 0
        self.stages: list[tuple[str, int, int]] = []
        self.entry = NOWHERE
        self.decode = SimulatedChunk(self, 1, prefill=False)
        """The piece of the decode token; there is never more than one at a time."""


class SimulatedChunk:
    """A piece: tokens of a session that travel together, a prompt's chunk or a decode token."""

    __slots__ = ("arrives_s", "dead", "final", "hop", "prefill", "sent_s", "session", "tokens")

    def __init__(
        self, session: SimulatedSession, tokens: int, *, final: bool = True, prefill: bool = True
    ) -> None:
        self.session = session
        self.tokens = tokens
        self.final = final
        """Whether the pass of this piece yields the session's next token."""
        self.prefill = prefill
        self.dead = False
        """Whether the session left the route: the piece yields nothing."""
        self.hop = NOWHERE
        self.sent_s = 0.0
        """When the latest link began to carry the piece."""
        self.arrives_s = 0.0
        """When the piece reaches the end of that link."""


class SimulatedHop:
    """One stage of a session's route: the segment that runs it and the link that it leaves by."""

    __slots__ = ("came_by", "following", "link", "segment")

    def __init__(
        self,
        segment: SimulatedSegment,
        link: "SimulatedLink",
        following: "SimulatedHop | None",
        came_by: "SimulatedLink | None" = None,
    ) -> None:
        self.segment = segment
        """The peer's segment at which the session enters."""
        self.link = link
        self.following = following
        """The next hop; None at the last stage, whose link leads to the clients."""
        self.came_by = came_by


_NOBODY = SimulatedPeer("nobody", 0, 1, NOTHING, ())
_NOBODY.busy = True
NOWHERE = SimulatedHop(
    SimulatedSegment(0, 0), SimulatedLink("nobody", _NOBODY, 1.0, 0.0, 0.0), None
)
NOWHERE.following = NOWHERE
NOWHERE.link.arrivals = deque(maxlen=1)
"""The hop of a piece that belongs to no route."""
