"""Helix's simulator: how its peers run batches and its links carry pieces (Helix §6.1).

A pass over a peer's layers: the batch at the current point of entry runs to the next point of
entry, is joined by the pieces that wait there, and so on to the peer's last layer; then the next
non-empty point of entry follows, in turn. Links carry one piece at a time, in order. Links need no
events; a peer reads its arrivals when it starts its next batch.
"""

from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter

from bench.papers.helix_batches import next_batch
from coordinator.simulator.core.clock import Clock
from coordinator.simulator.core.parts import (
    DECODE_TABLE_TOKENS,
    NEVER_S,
    PREFILL_TABLE_TOKENS,
    SimulatedPiece,
    SimulatedSession,
    Stage,
)
from coordinator.simulator.core.profiles import (
    NOTHING,
    PeerProfile,
    Profiles,
    StepLimits,
    interpolated,
)
from coordinator.simulator.core.swarm import Observer
from dht.messages.types import SINK, SOURCE, Assignment, Problem

_arrives_s = attrgetter("arrives_s")


class HelixLink:
    """A directed link that carries one piece at a time, first come, first served.

    Since pieces are served in order of arrival, the arrival of each piece at the far end is known
    when it is sent, and the link needs no events of its own.
    """

    __slots__ = (
        "arrivals",
        "busy_s",
        "free_s",
        "laden",
        "latency_s",
        "pieces",
        "source",
        "target",
        "token_s",
        "waited_s",
    )

    def __init__(
        self,
        source: str,
        target: "HelixPeer",
        bytes_per_s: float,
        latency_s: float,
        token_bytes: float,
    ) -> None:
        self.source = source
        self.target = target
        self.latency_s = latency_s
        self.token_s = token_bytes / bytes_per_s
        self.free_s = 0.0
        self.arrivals: deque[SimulatedPiece] = deque()
        """Pieces under way or waiting to be read, in order of arrival."""
        self.laden = 0
        """Number of pieces in ``arrivals`` that are more than one decode token."""
        self.busy_s = 0.0
        self.waited_s = 0.0
        self.pieces = 0


class HelixSegment:
    """The layers of a peer between two points of entry; they always run together."""

    __slots__ = ("end", "prefills", "queue", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.queue: list[SimulatedPiece] = []
        """Pieces that wait to enter here, in order of arrival."""
        self.prefills = 0
        """Number of prefill pieces in ``queue``."""


class HelixPeer:
    """A peer that holds layers ``[start, end)`` and runs one batch at a time."""

    __slots__ = (
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
        "limits",
        "name",
        "prefill_s",
        "running",
        "running_prefills",
        "segments",
        "start",
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
            HelixSegment(a, b) for a, b in zip(bounds, [*bounds[1:], end], strict=True)
        ]
        self.limits: StepLimits = profile.limits_of(max(1, end - start))
        self.prefill_s = interpolated(profile.prefill, PREFILL_TABLE_TOKENS)
        self.decode_s = list(interpolated(profile.decode, DECODE_TABLE_TOKENS))
        self.decode_s[1] *= profile.single_decode_factor
        self.copy_s_per_token = profile.copy_s_per_token
        self.kv_capacity = profile.kv.of(start, end, max(entries, default=0))
        self.kv_peak = 0
        self.inbound: list[HelixLink] = []
        self.at = 0
        self.busy = False
        self.wake_s = NEVER_S
        self.running: list[SimulatedPiece] = []
        self.running_prefills = 0
        self.arrived_tokens = 0
        self.busy_s = 0.0
        self.steps = 0
        self.tokens = 0

    def segment_at(self, layer: int) -> HelixSegment:
        """The segment that starts at ``layer``; ValueError when none does."""
        for segment in self.segments:
            if segment.start == layer:
                return segment
        raise ValueError(f"{self.name} cannot be entered at layer {layer}")

    @property
    def tokens_per_step(self) -> float:
        """Mean number of rows of a step."""
        return self.tokens * len(self.segments) / max(1, self.steps)

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


class HelixHop:
    """One stage of a session's route: the segment that runs it and the link that it leaves by."""

    __slots__ = ("came_by", "following", "link", "segment")

    def __init__(
        self,
        segment: HelixSegment,
        link: "HelixLink",
        following: "HelixHop | None",
        came_by: "HelixLink | None" = None,
    ) -> None:
        self.segment = segment
        """The peer's segment at which the session enters."""
        self.link = link
        self.following = following
        """The next hop; None at the last stage, whose link leads to the clients."""
        self.came_by = came_by


class HelixSwarm(Clock):
    """One simulated swarm under Helix's rules. It draws no random numbers."""

    def __init__(
        self,
        problem: Problem,
        profiles: Profiles,
        assignments: Sequence[Assignment],
        link_rate: Callable[[str, str, float], float] = lambda _source, _target, rate: rate,
    ) -> None:
        super().__init__()
        self.watch: Callable[[list[SimulatedPiece], float], None] | None = None
        """Called with each batch that has passed a peer's last layer, and the time."""
        self.sink = HelixPeer(SINK, 0, 1, NOTHING, ())
        self.sink.busy = True
        self.links: dict[tuple[str, str], HelixLink] = {}
        self._wires = {
            (link.source, link.target): (link.bandwidth_bytes_per_s, link.rtt_s / 2)
            for link in problem.links
        } | dict(profiles.client_links)
        self._default = problem.default_bandwidth_bytes_per_s, problem.default_rtt_s / 2
        self._link_rate = link_rate
        self._id_bytes = float(problem.token_bytes)
        self._state_bytes = float(problem.model.activation_bytes + problem.token_bytes)
        self._observer: Observer | None = None
        ends = {a.end for a in assignments}
        self.peers = {
            a.peer_id: HelixPeer(a.peer_id, a.start, a.end, profiles.peers[a.peer_id], tuple(ends))
            for a in assignments
            if a.start < a.end
        }

    def link(self, source: str, target: str) -> HelixLink:
        """The link between two peers, or with ``source`` or ``sink``; made at its first use."""
        found = self.links.get((source, target))
        if found is None:
            bytes_per_s, latency_s = self._wires.get((source, target), self._default)
            bytes_per_s = self._link_rate(source, target, bytes_per_s)
            peer = self.sink if target == SINK else self.peers[target]
            ids_only = source == SOURCE or target == SINK
            each = self._id_bytes if ids_only else self._state_bytes
            found = HelixLink(source, peer, bytes_per_s, latency_s, each)
            self.links[source, target] = found
            peer.inbound.append(found)
        return found

    def open(
        self, session: SimulatedSession, stages: Sequence[Stage], tokens: int | None = None
    ) -> None:
        """Start a session now over a route, with its whole prompt as one piece."""
        following: HelixHop | None = None
        target = SINK
        for name, start, _ in reversed(stages):
            hop = HelixHop(self.peers[name].segment_at(start), self.link(name, target), following)
            if following is not None:
                following.came_by = hop.link
            following, target = hop, name
        entry = HelixHop(HelixSegment(0, 0), self.link(SOURCE, target), following)
        if following is not None:
            following.came_by = entry.link
        session.stages = list(stages)
        session.entry = entry
        session.issued_s = self.now_s
        self._send(SimulatedPiece(session, tokens or session.input_tokens), entry)

    def place(self, session: SimulatedSession, stages: Sequence[Stage]) -> None:
        """Raise: Helix's simulator begins without sessions."""
        raise NotImplementedError

    def cancel(self, session: SimulatedSession) -> None:
        """Raise: nobody leaves in Helix's simulator."""
        raise NotImplementedError

    def go_round(self, session: SimulatedSession) -> None:
        """Raise: nobody waits for KV in Helix's simulator."""
        raise NotImplementedError

    def _send(self, piece: SimulatedPiece, hop: HelixHop) -> None:
        """Put one piece on the link that leaves ``hop``."""
        link = hop.link
        now_s = self.now_s
        start_s = link.free_s
        if start_s < now_s:
            start_s = now_s
        else:
            link.waited_s += start_s - now_s
        piece.sent_s = start_s
        took_s = piece.tokens * link.token_s
        link.free_s = start_s + took_s
        link.busy_s += took_s
        link.pieces += 1
        self.arrive(piece, hop, link.free_s + link.latency_s)

    def arrive(self, piece: SimulatedPiece, hop: HelixHop, arrival_s: float) -> None:
        """Let a piece that left ``hop`` arrive at a time, not before earlier pieces of its link."""
        link = hop.link
        target = link.target
        following = hop.following
        if following is None:
            self.at(arrival_s, self._token, piece)
            return
        piece.hop = following
        piece.arrives_s = arrival_s
        link.arrivals.append(piece)
        if piece.prefill or piece.tokens != 1:
            link.laden += 1
        if not target.busy and arrival_s < target.wake_s:
            self.wake_at(target, arrival_s)

    def wake_at(self, peer: HelixPeer, at_s: float) -> None:
        """Wake an idle peer at a time, to read its arrivals."""
        peer.wake_s = at_s
        self.at(at_s, self._woken, peer)

    def _woken(self, peer: HelixPeer) -> None:
        if not peer.busy and peer.wake_s == self.now_s:
            peer.wake_s = NEVER_S
            self._start_batch(peer)

    def run(self, until_s: float, observer: Observer) -> int:
        """Handle all events up to a time; returns their number."""
        self._observer = observer
        return self.pass_until(until_s)

    def _token(self, piece: SimulatedPiece) -> None:
        session, observer = piece.session, self._observer
        if observer is None:
            return
        session.tokens_in_kv += piece.tokens
        now_s = self.now_s
        issued_s = session.issued_s
        if not piece.prefill:
            session.left_tokens -= 1
            observer.token_done(session, now_s, issued_s)
            if session.left_tokens == 0:
                observer.session_done(session, now_s)
                return
        else:
            session.prompting = False
            observer.prompt_done(session, now_s)
        session.issued_s = now_s
        self._send(session.decode, session.entry)

    def _read_arrivals(self, peer: HelixPeer) -> None:
        """Queue the pieces that have arrived by now, in order of arrival."""
        now_s = self.now_s
        came: list[SimulatedPiece] = []
        links = 0
        alike = len(peer.segments) == 1
        for link in peer.inbound:
            arrivals = link.arrivals
            if not arrivals or arrivals[0].arrives_s > now_s:
                continue
            links += 1
            # Decodes arrive in order, so if the last has arrived, all have; prompts are overtaken.
            if not link.laden and arrivals[-1].arrives_s <= now_s:
                came += arrivals
                arrivals.clear()
                continue
            while arrivals and arrivals[0].arrives_s <= now_s:
                piece = arrivals.popleft()
                came.append(piece)
                if piece.prefill or piece.tokens != 1:
                    link.laden -= 1
                    alike = False
        if links > 1:
            came.sort(key=_arrives_s)
        if alike:
            peer.segments[0].queue += came
            peer.arrived_tokens += len(came)
            return
        arrived = 0
        for piece in came:
            arrived += piece.tokens
            segment = piece.hop.segment
            segment.queue.append(piece)
            if piece.prefill:
                segment.prefills += 1
        peer.arrived_tokens += arrived

    def _start_batch(self, peer: HelixPeer) -> None:
        """Read arrivals and run the next non-empty segment, if there is any."""
        self._read_arrivals(peer)
        segments = peer.segments
        at, count = peer.at, len(segments)
        for _ in range(count):
            segment = segments[at]
            if segment.queue:
                break
            at += 1
            if at == count:
                at = 0
        else:
            peer.busy = False
            self._sleep(peer)
            return
        peer.at = at
        queue = segment.queue
        limits = peer.limits
        prefills, tokens = segment.prefills, 0
        many = len(queue)
        if prefills or many > limits.decodes_max or many * 4096 > limits.context_tokens_max:
            queue, segment.queue, prefills, tokens = next_batch(queue, limits)
            segment.prefills -= prefills
        else:
            segment.queue = []
        decodes = len(queue) - prefills
        table = peer.decode_s
        if decodes < len(table):
            took_s = table[decodes] if decodes else 0.0
        else:
            took_s = peer.decode_time(decodes)
        if prefills:
            took_s += peer.prefill_time(tokens)
        took_s *= segment.end - segment.start
        if at == 0:
            took_s += peer.arrived_tokens * peer.copy_s_per_token
            peer.arrived_tokens = 0
        peer.running = queue
        peer.running_prefills = prefills
        peer.busy = True
        peer.busy_s += took_s
        peer.steps += 1
        self.at(self.now_s + took_s, self._end_batch, peer)

    def _sleep(self, peer: HelixPeer) -> None:
        """Wake an idle peer at its next arrival."""
        wake_s = NEVER_S
        for link in peer.inbound:
            arrivals = link.arrivals
            if arrivals and arrivals[0].arrives_s < wake_s:
                wake_s = arrivals[0].arrives_s
        if wake_s < NEVER_S:
            self.wake_at(peer, wake_s)
        else:
            peer.wake_s = wake_s

    def _end_batch(self, peer: HelixPeer) -> None:
        batch = peer.running
        if peer.at + 1 < len(peer.segments):
            peer.at += 1
            segment = peer.segments[peer.at]
            segment.queue.extend(batch)
            segment.prefills += peer.running_prefills
        else:
            peer.at = 0
            if self.watch is not None:
                self.watch(batch, self.now_s)
            if peer.running_prefills:
                tokens = 0
                for piece in batch:
                    self._send(piece, piece.hop)
                    tokens += piece.tokens
                peer.tokens += tokens
            else:
                for piece in batch:
                    self._send(piece, piece.hop)
                peer.tokens += len(batch)
        self._start_batch(peer)
