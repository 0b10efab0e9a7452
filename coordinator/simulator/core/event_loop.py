"""The simulator's event loop: peers run batches, links carry pieces, sessions go around the ring.

Events are ends of batches, wake-ups of peers for an arrival, tokens at the sink, and timed calls.
Links need no events (:class:`coordinator.simulator.core.parts.SimulatedLink`); a peer reads its
arrivals when it starts its next batch.

A peer's pass over its layers (Helix §6.1): the batch at the current point of entry runs to the
next point of entry, is joined by the pieces that wait there, and so on to the peer's last layer;
then the next non-empty point of entry follows, in turn.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Protocol

from coordinator.simulator.core.batching import next_batch
from coordinator.simulator.core.parts import (
    NEVER_S,
    NOWHERE,
    SimulatedChunk,
    SimulatedHop,
    SimulatedLink,
    SimulatedPeer,
    SimulatedSession,
    SimulatedWire,
)
from coordinator.simulator.core.profiles import NOTHING, PeerProfile, Profiles
from dht.messages.types import SINK, SOURCE, Assignment, Problem
from dht.simulated.event_log import listened, log_event

BATCH, WAKE, TOKEN, CALL = range(4)
_arrives_s = attrgetter("arrives_s")
_is_prefill = attrgetter("prefill")

Stage = tuple[str, int, int]
"""A peer, and the half-open range of layers that it runs."""


class Observer(Protocol):
    """Receives the progress of sessions, and may open new ones."""

    def prompt_done(self, session: SimulatedSession, now_s: float) -> None: ...

    def token_done(self, session: SimulatedSession, now_s: float, issued_s: float) -> None: ...

    def session_done(self, session: SimulatedSession, now_s: float) -> None: ...


class SwarmSimulation:
    """One simulated swarm. It draws no random numbers."""

    def __init__(
        self,
        problem: Problem,
        profiles: Profiles,
        assignments: Sequence[Assignment],
        *,
        link_rate: Callable[[str, str, float], float] | None = None,
        decodes_leave_first: bool = False,
        weights_take_time: bool = False,
    ) -> None:
        """``weights_take_time``: a step with few prefill tokens takes at least a decode step's
        time, since both read the weights. Helix's layer times alone would make it shorter."""
        self.now_s = 0.0
        self._weights_take_time = weights_take_time
        self._cancelled = False
        """Whether pieces of cancelled sessions may be under way."""
        self.decodes_leave_first = decodes_leave_first
        """Whether a step's decodes are put on the links before its prompts."""
        self.watch: Callable[[list[SimulatedChunk], float], None] | None = None
        """Called with each batch that has passed a peer's last layer, and the time."""
        self.make_wire: Callable[[SwarmSimulation, SimulatedLink], SimulatedWire] | None = None
        """Makes links with a scheduler of their own; None: first come, first served."""
        self.layers = problem.model.layers
        self.peers: dict[str, SimulatedPeer] = {}
        self.sink = SimulatedPeer(SINK, 0, 1, NOTHING, ())
        self.sink.busy = True
        self.links: dict[tuple[str, str], SimulatedLink] = {}
        self._profiles = profiles
        self._wires = {
            (link.source, link.target): (link.bandwidth_bytes_per_s, link.rtt_s / 2)
            for link in problem.links
        } | dict(profiles.client_links)
        self._default = problem.default_bandwidth_bytes_per_s, problem.default_rtt_s / 2
        self._link_rate = link_rate or (lambda _source, _target, bytes_per_s: bytes_per_s)
        self._id_bytes = float(problem.token_bytes)
        self._state_bytes = float(problem.model.activation_bytes + problem.token_bytes)
        self._events: list[tuple[float, int, int, object]] = []
        self._sequence = itertools.count()
        ends = {a.end for a in assignments}
        for a in assignments:
            if a.start < a.end:
                profile = profiles.peers[a.peer_id]
                entries = [end for end in ends if a.start < end < a.end]
                self.peers[a.peer_id] = self._peer(a, profile, entries)

    def call_at(self, at_s: float, call: Callable[[], None]) -> None:
        """Schedule ``call`` for a time that is not in the past."""
        heapq.heappush(self._events, (at_s, next(self._sequence), CALL, call))

    def link(self, source: str, target: str) -> SimulatedLink:
        """The link between two peers, or with ``source`` or ``sink``; made at its first use."""
        found = self.links.get((source, target))
        if found is None:
            bytes_per_s, latency_s = self._wires.get((source, target), self._default)
            bytes_per_s = self._link_rate(source, target, bytes_per_s)
            peer = self.sink if target == SINK else self.peers[target]
            ids_only = source == SOURCE or target == SINK
            found = SimulatedLink(
                source,
                peer,
                bytes_per_s,
                latency_s,
                self._id_bytes if ids_only else self._state_bytes,
            )
            if self.make_wire is not None:
                found.wire = self.make_wire(self, found)
            self.links[source, target] = found
            peer.inbound.append(found)
        return found

    def open(
        self,
        session: SimulatedSession,
        stages: Sequence[Stage],
        pieces: Iterable[SimulatedChunk],
        source: str = SOURCE,
    ) -> None:
        """Start a session now over a route, with its prompt as ``pieces`` in order."""
        session.stages = list(stages)
        session.entry = self.way(stages, source)
        session.issued_s = self.now_s
        session.prompt = list(pieces)
        for piece in session.prompt:
            self._send(piece, session.entry)

    def way(self, stages: Sequence[Stage], source: str = SOURCE) -> SimulatedHop:
        """The first of the hops from ``source`` over ``stages`` to the sink, before any stage."""
        following: SimulatedHop | None = None
        target = SINK
        for name, start, _ in reversed(stages):
            hop = SimulatedHop(
                self.peers[name].segment_at(start), self.link(name, target), following
            )
            if following is not None:
                following.came_by = hop.link
            following, target = hop, name
        entry = SimulatedHop(NOWHERE.segment, self.link(source, target), following)
        if following is not None:
            following.came_by = entry.link
        return entry

    def resume(self, session: SimulatedSession, stages: Sequence[Stage]) -> None:
        """Send a session's next token over ``stages``, which hold its KV."""
        session.stages = list(stages)
        session.entry = self.way(stages)
        self._send(session.decode, session.entry)

    def cancel(self, session: SimulatedSession) -> None:
        """Take a session off its route: its pieces under way yield no token.

        Steps that hold its pieces still run them, as real ones would.
        """
        self._cancelled = True
        for piece in (session.decode, *session.prompt):
            piece.hop = NOWHERE
            piece.dead = True
        session.decode = SimulatedChunk(session, 1, prefill=False)
        session.prompt = []

    def fail(self, name: str) -> None:
        """Remove a peer and its links; the caller cancels its sessions."""
        peer = self.peers.pop(name)
        peer.alive = False
        peer.busy = True
        for pair in [pair for pair in self.links if name in pair]:
            del self.links[pair]
        for other in self.peers.values():
            other.inbound = [link for link in other.inbound if link.source != name]

    def add(self, assignment: Assignment, entries: Iterable[int]) -> None:
        """Add a peer that holds layers; ``entries`` are the layers at which it may be entered."""
        name = assignment.peer_id
        self.peers[name] = self._peer(assignment, self._profiles.peers[name], tuple(entries))

    def _peer(
        self, held: Assignment, profile: PeerProfile, entries: Sequence[int]
    ) -> SimulatedPeer:
        peer = SimulatedPeer(held.peer_id, held.start, held.end, profile, entries)
        peer.step_least_s = peer.decode_s[2] if self._weights_take_time else 0.0
        return peer

    def _send(self, piece: SimulatedChunk, hop: SimulatedHop) -> None:
        """Put one piece on the link that leaves ``hop``."""
        link = hop.link
        if link.wire is not None:
            link.wire.offer(piece, hop)
            return
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

    def arrive(self, piece: SimulatedChunk, hop: SimulatedHop, arrival_s: float) -> None:
        """Let a piece that left ``hop`` arrive at a time, not before earlier pieces of its link."""
        if piece.dead:
            return
        link = hop.link
        target = link.target
        following = hop.following
        if following is None:
            heapq.heappush(self._events, (arrival_s, next(self._sequence), TOKEN, piece))
            return
        piece.hop = following
        piece.arrives_s = arrival_s
        link.arrivals.append(piece)
        if piece.prefill or piece.tokens != 1:
            link.laden += 1
        if not target.busy and arrival_s < target.wake_s:
            self.wake_at(target, arrival_s)

    def wake_at(self, peer: SimulatedPeer, at_s: float) -> None:
        """Wake an idle peer at a time, to read its arrivals."""
        peer.wake_s = at_s
        heapq.heappush(self._events, (at_s, next(self._sequence), WAKE, peer))

    def run(self, until_s: float, observer: Observer) -> int:
        """Handle all events up to a time; returns their number."""
        events, pop, noting = self._events, heapq.heappop, listened()
        end_batch, token = self._end_batch, self._token
        handled = 0
        while events and events[0][0] <= until_s:
            now_s, number, kind, what = pop(events)
            if noting:
                log_event(f"{now_s:.6f} {number} {kind}")
            self.now_s = now_s
            handled += 1
            if kind == BATCH:
                end_batch(what)  # type: ignore[arg-type]
            elif kind == TOKEN:
                token(what, observer)  # type: ignore[arg-type]
            elif kind == WAKE:
                peer: SimulatedPeer = what  # type: ignore[assignment]
                if not peer.busy and peer.wake_s == now_s:
                    peer.wake_s = NEVER_S
                    self._start_batch(peer)
            else:
                what()  # type: ignore[operator]
        self.now_s = max(self.now_s, until_s)
        return handled

    def _token(self, piece: SimulatedChunk, observer: Observer) -> None:
        if piece.dead:
            return
        session = piece.session
        session.tokens_in_kv += piece.tokens
        if not piece.final:
            return
        now_s = self.now_s
        issued_s = session.issued_s
        if not piece.prefill:
            session.left_tokens -= 1
            observer.token_done(session, now_s, issued_s)
            if session.left_tokens == 0:
                observer.session_done(session, now_s)
                return
        else:
            session.prompt = []
            observer.prompt_done(session, now_s)
        session.issued_s = now_s
        self._send(session.decode, session.entry)

    def _read_arrivals(self, peer: SimulatedPeer) -> None:
        """Queue the pieces that have arrived by now, in order of arrival."""
        now_s = self.now_s
        came: list[SimulatedChunk] = []
        links = 0
        alike = not self._cancelled and len(peer.segments) == 1
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

    def _start_batch(self, peer: SimulatedPeer) -> None:
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
            took_s = max(took_s + peer.prefill_time(tokens), peer.step_least_s)
        took_s *= segment.end - segment.start
        if at == 0:
            took_s += peer.arrived_tokens * peer.copy_s_per_token
            peer.arrived_tokens = 0
        took_s *= peer.slowdown
        if peer.stalled_until_s > self.now_s:
            took_s += peer.stalled_until_s - self.now_s
        peer.running = queue
        peer.running_prefills = prefills
        peer.busy = True
        peer.busy_s += took_s
        peer.steps += 1
        heapq.heappush(self._events, (self.now_s + took_s, next(self._sequence), BATCH, peer))

    def _sleep(self, peer: SimulatedPeer) -> None:
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

    def _end_batch(self, peer: SimulatedPeer) -> None:
        if not peer.alive:
            return
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
                if self.decodes_leave_first:
                    batch.sort(key=_is_prefill)
                tokens = 0
                for piece in batch:
                    hop = piece.hop
                    wire = hop.link.wire
                    if wire is not None:
                        wire.offer(piece, hop)
                    else:
                        self._send(piece, hop)
                    tokens += piece.tokens
                peer.tokens += tokens
            else:
                self._send_all(batch)
                peer.tokens += len(batch)
        self._start_batch(peer)

    def _send_all(self, decodes: list[SimulatedChunk]) -> None:
        """Send decodes on, each over its route's link: :meth:`_send` inlined for speed."""
        now_s = self.now_s
        events, push, sequence = self._events, heapq.heappush, self._sequence
        for piece in decodes:
            hop = piece.hop
            link = hop.link
            if link.wire is not None:
                link.wire.offer(piece, hop)
                continue
            free_s = link.free_s
            if free_s < now_s:
                free_s = now_s
            else:
                link.waited_s += free_s - now_s
            piece.sent_s = free_s
            token_s = link.token_s
            free_s += token_s
            link.busy_s += token_s
            link.free_s = free_s
            link.pieces += 1
            free_s += link.latency_s
            following = hop.following
            if following is None:
                push(events, (free_s, next(sequence), TOKEN, piece))
                continue
            piece.hop = following
            piece.arrives_s = free_s
            link.arrivals.append(piece)
            if piece.tokens != 1:
                link.laden += 1
            target = link.target
            if not target.busy and free_s < target.wake_s:
                target.wake_s = free_s
                push(events, (free_s, next(sequence), WAKE, target))
