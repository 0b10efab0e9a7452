"""A swarm on paper under the living rules: peers run steps, links carry frames, sessions go round.

What a step runs is decided by the stages' own scheduler
(:class:`coordinator.policies.batching.scheduler.Scheduler`), how prompts are cut by their chunk
sizer (:class:`coordinator.policies.links.chunk_sizer.ChunkSizer`), what leaves next by their link
scheduler or its closed form. As in a stage, the rows of a step for one next peer share a frame,
decodes before prompts, and each chunk of a prompt has its own.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Protocol

from coordinator.evaluation.shared_uplinks import shared_uplinks
from coordinator.policies.failure.detector import SAMPLES_MAX
from coordinator.policies.links.chunk_sizer import QUEUED_BYTES_MAX, RESENT_TOKENS
from coordinator.policies.links.scheduler import TrafficClass
from coordinator.simulator.core.clock import Clock
from coordinator.simulator.core.parts import (
    NOWHERE,
    SimulatedHop,
    SimulatedLink,
    SimulatedPeer,
    SimulatedPiece,
    SimulatedSession,
    SimulatedWire,
    Stage,
)
from coordinator.simulator.core.profiles import Profiles
from dht.messages.types import SINK, SOURCE, Assignment, Problem

AS_CHOSEN = 0
"""Value of ``chunk_tokens`` for chunks as the stages choose them."""

INFINITE = float("inf")

PieceFrame = tuple[SimulatedPeer | None, list[SimulatedPiece]]
PiecesByLink = dict[SimulatedLink | None, list[SimulatedPiece]]
"""Pieces by the link that they leave by; None: they stay at their peer."""


class Observer(Protocol):
    """Receives the progress of sessions, and may open new ones. Times are those at the client."""

    def prompt_done(self, session: SimulatedSession, now_s: float) -> None: ...

    def token_done(self, session: SimulatedSession, now_s: float, issued_s: float) -> None: ...

    def session_done(self, session: SimulatedSession, now_s: float) -> None: ...


class LiveSwarm(Clock):
    """One simulated swarm. It draws no random numbers."""

    def __init__(
        self,
        problem: Problem,
        profiles: Profiles,
        assignments: Sequence[Assignment],
        make_wire: "Callable[[LiveSwarm], SimulatedWire]",
        *,
        chunk_tokens: int | None = AS_CHOSEN,
        hub: bool = False,
    ) -> None:
        """``chunk_tokens``: tokens of a prompt's chunk, :data:`AS_CHOSEN`, or None for whole
        prompts. ``hub``: tokens go from the last stage to the first over the clients' host."""
        super().__init__()
        self.layers = problem.model.layers
        self.peers: dict[str, SimulatedPeer] = {}
        self.links: dict[tuple[str, str], SimulatedLink] = {}
        self._profiles = profiles
        self._wires = {
            (link.source, link.target): (link.bandwidth_bytes_per_s, link.rtt_s / 2)
            for link in problem.links
        } | dict(profiles.client_links)
        self._default = problem.default_bandwidth_bytes_per_s, problem.default_rtt_s / 2
        self._make_wire = make_wire
        self._uplinks = shared_uplinks(problem)
        self._shared: dict[tuple[str, str], SimulatedWire] = {}
        self._chunk_tokens = chunk_tokens
        self._hub = hub
        self._id_bytes = float(problem.token_bytes)
        self._row_bytes = float(problem.model.activation_bytes + problem.token_bytes)
        self._observer: Observer | None = None
        for a in assignments:
            if a.start < a.end:
                self.add(a)

    def run(self, until_s: float, observer: Observer) -> int:
        """Handle all events up to a time; returns their number."""
        self._observer = observer
        return self.pass_until(until_s)

    # Peers and links

    def one_way_s(self, source: str, target: str) -> float:
        """Seconds that an empty frame takes between two peers whose link is idle."""
        return self._wires.get((source, target), self._default)[1]

    def add(self, assignment: Assignment) -> None:
        """Add a peer that holds layers."""
        name, start, end = assignment.peer_id, assignment.start, assignment.end
        profile = self._profiles.peers[name]
        self.peers[name] = SimulatedPeer(name, start, end, profile, self.layers)

    def fail(self, name: str) -> None:
        """Remove a peer and its links; the caller cancels its sessions."""
        self.peers.pop(name).alive = False
        for pair in [pair for pair in self.links if name in pair]:
            del self.links[pair]
        self._shared.pop((name, ""), None)

    def link(self, source: str, target: str) -> SimulatedLink:
        """The link between two peers, or with ``source`` or ``sink``; made at its first use.

        The links of a peer whose own uplink is known share that; of its downlink each may fill all.
        Those that pass a connection which several peers share share both directions of it.
        """
        found = self.links.get((source, target))
        if found is None:
            bytes_per_s, latency_s = self._wires.get((source, target), self._default)
            up = self._profiles.peers[source].out_bytes_per_s if source in self.peers else INFINITE
            down = self._profiles.peers[target].in_bytes_per_s if target in self.peers else INFINITE
            bytes_per_s = min(bytes_per_s, down)
            peer = None if target == SINK else self.peers[target]
            parts = [(up, self._sender(source, ""))] if up < INFINITE else []
            for name, way in self._uplinks.crossed(source, target):
                parts.append((self._uplinks.bytes_per_s[name, way], self._sender(name, way)))
            if not any(rate <= bytes_per_s for rate, _ in parts):
                parts.append((bytes_per_s, self._make_wire(self)))
            for rate, wire in reversed(parts):
                delay_s = latency_s if found is None else 0.0
                found = SimulatedLink(source, peer, rate, delay_s, wire, found)
            assert found is not None  # noqa: S101 - there is one part at least
            self.links[source, target] = found
        return found

    def _sender(self, name: str, way: str) -> SimulatedWire:
        """The sender that all links over a peer's own uplink share (no ``way``), or over a shared
        one."""
        if (name, way) not in self._shared:
            self._shared[name, way] = self._make_wire(self)
        return self._shared[name, way]

    def leave(
        self,
        link: SimulatedLink,
        at_s: float,
        frame: list[SimulatedPiece],
        size_bytes: float,
        traffic: TrafficClass,
    ) -> None:
        """Let a frame that leaves a wire at ``at_s`` arrive, or go onward."""
        if link.onward is None:
            self.at(at_s + link.latency_s, self.arrived, (link.target, frame))
        else:
            self.at(at_s, link.pass_on, (frame, size_bytes, traffic))

    # Sessions

    def open(
        self,
        session: SimulatedSession,
        stages: Sequence[Stage],
        tokens: int | None = None,
        source: str = SOURCE,
    ) -> None:
        """Start a session now over a route, with its prompt or a replay of ``tokens`` tokens.

        From a ``source`` that is a peer come the rows of its log.
        """
        self._take(session, stages)
        session.issued_s = self.now_s
        session.prompting = True
        count = session.input_tokens if tokens is None else tokens
        link = self.link(source, stages[0][0])
        if source == SOURCE:
            session.unfed_tokens, session.fed_tokens = count, 0
            took_s = count * self._id_bytes / link.bytes_per_s
            self.at(self.now_s + took_s + link.latency_s, self._feed, (session, session.entry))
            return
        for at in range(0, count, RESENT_TOKENS):
            size = min(RESENT_TOKENS, count - at)
            piece = SimulatedPiece(session, size, final=at + size == count)
            piece.background = session.warming
            piece.position = at
            piece.hop = session.entry
            session.prompt.append(piece)
            link.send([piece], size * self._row_bytes, TrafficClass.PREFILL)

    def place(self, session: SimulatedSession, stages: Sequence[Stage]) -> None:
        """Let a session be in the middle of its answer, its KV at the stages."""
        self._take(session, stages)
        session.prompting = False

    def enter(self, session: SimulatedSession) -> None:
        """Let the client send the next token of a session that was placed, if it is still there."""
        if session.hops and not session.prompting:
            session.issued_s = self.now_s
            self._enter(session)

    def switch(
        self, session: SimulatedSession, stages: Sequence[Stage], *, since_tokens: int
    ) -> None:
        """From the next token on, run a session over other stages, which have its KV but for the
        last ``since_tokens`` tokens: those go along with the next token."""
        self._leave(session)
        self._take(session, stages)
        session.tokens_in_kv -= since_tokens
        session.decode = SimulatedPiece(session, 1 + since_tokens, prefill=False)

    def resume(self, session: SimulatedSession, stages: Sequence[Stage]) -> None:
        """Let the client send a session's next token over ``stages``, which hold its KV."""
        self._take(session, stages)
        self._enter(session)

    def go_round(self, session: SimulatedSession) -> None:
        """Send the next token of a session that waited at its last stage."""
        session.waits = False
        last = session.hops[-1]
        tokens: PiecesByLink = {}
        self._to_first(session, last, tokens)
        for link, pieces in tokens.items():
            self._pass_on(last.peer, link, pieces, self._id_bytes, TrafficClass.CONTROL)

    def cancel(self, session: SimulatedSession) -> None:
        """Take a session off its route: its pieces under way yield no token.

        Steps that hold its pieces still run them, as real ones would.
        """
        for piece in (session.decode, *session.prompt):
            piece.hop = NOWHERE
            piece.dead = True
        for hop in session.hops:
            hop.peer.scheduler.drop(session)
        session.waits = False
        self._leave(session)
        session.decode = SimulatedPiece(session, 1, prefill=False)
        session.prompt = []

    def _take(self, session: SimulatedSession, stages: Sequence[Stage]) -> None:
        """Lay a session's ring over ``stages``."""
        session.stages = list(stages)
        hops = tuple(SimulatedHop(self.peers[name], start, end) for name, start, end in stages)
        for hop, following in pairwise((*hops, hops[0])):
            hop.following = following
            if hop.peer is not following.peer:
                hop.link = self.link(hop.peer.name, following.peer.name)
            hop.peer.sessions += 1
            if (hop.start, hop.end) != (hop.peer.start, hop.peer.end):
                hop.peer.partial = True
        hops[0].first = hops[-1].last = True
        answer = self.link(hops[-1].peer.name, SINK)
        if self._hub:
            hops[-1].link = answer
        way = answer.narrowest
        session.answer_s = way.latency_s + self._id_bytes / way.bytes_per_s
        session.hops = hops
        session.entry = hops[0]

    def _leave(self, session: SimulatedSession) -> None:
        for hop in session.hops:
            hop.peer.sessions -= 1
        session.hops = ()
        session.entry = NOWHERE

    def _enter(self, session: SimulatedSession) -> None:
        """Send the session's next token from the clients to the first stage."""
        first, piece = session.entry, session.decode
        piece.hop = first
        link = self.link(SOURCE, first.peer.name)
        link.send([piece], piece.tokens * self._id_bytes, TrafficClass.CONTROL)

    # Prompts

    def _feed(self, fed: tuple[SimulatedSession, SimulatedHop]) -> None:
        """Give the first stage a session's next chunk, unless its link is behind."""
        session, hop = fed
        left = session.unfed_tokens
        if not session.hops or hop is not session.entry or not left:  # cancelled, or moved
            return
        link = hop.link
        for part in () if link is None else link.parts:
            if part.wire.queued_bytes > QUEUED_BYTES_MAX:
                part.wire.stalled.append(session)
                return
        size = min(left, self._chunk_of(session, hop, link, left))
        session.unfed_tokens = left - size
        session.fed_tokens += size
        piece = SimulatedPiece(session, size, final=size == left)
        piece.background = session.warming
        piece.position = session.fed_tokens - size
        piece.hop = hop
        session.prompt.append(piece)
        self.arrived((hop.peer, [piece]))

    def _chunk_of(
        self,
        session: SimulatedSession,
        hop: SimulatedHop,
        link: SimulatedLink | None,
        left_tokens: int,
    ) -> int:
        if self._chunk_tokens is None:
            return left_tokens
        if self._chunk_tokens:
            return self._chunk_tokens
        if session.warming and hop.peer.sessions > 1:
            return hop.peer.sizer.beside()
        return hop.peer.sizer.choose(
            left_tokens,
            len(session.hops),
            link_row_s=None if link is None else self._row_bytes / link.narrowest.bytes_per_s,
            others_decode=hop.peer.sessions > 1,
        )

    def go_on(self, wire: SimulatedWire) -> None:
        """Feed the prompts that waited for a link, if it has caught up."""
        if wire.queued_bytes <= QUEUED_BYTES_MAX:
            stalled, wire.stalled = wire.stalled, []
            for session in stalled:
                self._feed((session, session.entry))

    # Steps

    def arrived(self, frame: PieceFrame) -> None:
        """Take in the pieces that came together, and begin a step where the peer is idle."""
        peer, pieces = frame
        if peer is None:
            self._at_clients(pieces)
            return
        if not peer.alive:
            return
        now_s, add = self.now_s, peer.scheduler.add
        for piece in pieces:
            if not piece.dead:
                piece.queued_s = now_s
                add(piece)
        if peer.copy_s_per_token:
            peer.arrived_tokens += sum(piece.tokens for piece in pieces)
        if not peer.busy:
            self._begin(peer)

    def _begin(self, peer: SimulatedPeer) -> None:
        """Begin a step, if work waits."""
        now_s = self.now_s
        batch = peer.scheduler.next_batch(now_s)
        if not batch:
            peer.busy = False
            wait_s = peer.scheduler.wait_s(now_s)
            if wait_s is not None:  # nobody waits for that work: it runs when the peer is quiet
                self.at(now_s + wait_s, self._quiet, peer)
            return
        took_s = self._step_s(peer, batch) * peer.layer_factor
        if peer.arrived_tokens:
            took_s += peer.arrived_tokens * peer.copy_s_per_token
            peer.arrived_tokens = 0
        took_s *= peer.slowdown
        peer.running = batch
        peer.busy = True
        peer.began_s = now_s
        peer.busy_s += took_s
        peer.steps += 1
        self.at(now_s + took_s, self._ended, peer)

    def _quiet(self, peer: SimulatedPeer) -> None:
        if peer.alive and not peer.busy:
            self._begin(peer)

    def _step_s(self, peer: SimulatedPeer, batch: list[SimulatedPiece]) -> float:
        """Time of a step in seconds; each layer's depends on the rows that run it."""
        rows = _rows(batch)
        decodes, _, prefill, _ = rows
        peer.rows = prefill + decodes
        peer.tokens += peer.rows
        peer.decodes_only = prefill == 0
        if not peer.partial:
            return peer.layers * peer.layer_s(*rows)
        total_s = 0.0
        bounds = sorted({edge for piece in batch for edge in (piece.hop.start, piece.hop.end)})
        for start, end in pairwise(bounds):
            here = [p for p in batch if p.hop.start <= start and end <= p.hop.end]
            if here:
                total_s += (end - start) * peer.layer_s(*_rows(here))
        return total_s

    def _ended(self, peer: SimulatedPeer) -> None:
        """End a step: send tokens, then decodes, then prompts on, and begin the next step."""
        if not peer.alive:
            return
        batch = peer.running
        peer.running = ()
        self._learn(peer, batch)
        fed: list[tuple[SimulatedSession, SimulatedHop]] = []
        if not peer.decodes_only:
            fed = [(p.session, p.hop) for p in batch if p.prefill and p.hop.first]
        tokens: PiecesByLink = {}
        decodes: PiecesByLink = {}
        prompts: list[tuple[SimulatedLink | None, SimulatedPiece]] = []
        for piece in batch:
            if piece.dead:
                continue
            hop = piece.hop
            if hop.last:
                self._at_last(piece, hop, tokens)
                continue
            piece.hop = hop.following
            if piece.prefill or piece.tokens != 1:
                prompts.append((hop.link, piece))
            elif hop.link in decodes:
                decodes[hop.link].append(piece)
            else:
                decodes[hop.link] = [piece]
        for link, pieces in tokens.items():
            size_bytes = self._id_bytes * sum(piece.tokens for piece in pieces)
            self._pass_on(peer, link, pieces, size_bytes, TrafficClass.CONTROL)
        for link, pieces in decodes.items():
            self._pass_on(peer, link, pieces, self._row_bytes * len(pieces), TrafficClass.DECODE)
        for link, piece in prompts:
            size_bytes = self._row_bytes * piece.tokens
            self._pass_on(peer, link, [piece], size_bytes, TrafficClass.PREFILL)
        for session_hop in fed:
            self._feed(session_hop)
        self._begin(peer)

    def _pass_on(
        self,
        peer: SimulatedPeer,
        link: SimulatedLink | None,
        pieces: list[SimulatedPiece],
        size_bytes: float,
        traffic: TrafficClass,
    ) -> None:
        if link is None:
            self.arrived((peer, pieces))
        else:
            link.send(pieces, size_bytes, traffic)

    def _learn(self, peer: SimulatedPeer, batch: Sequence[SimulatedPiece]) -> None:
        """Take a step's times as a stage does."""
        now_s, began_s = self.now_s, peer.began_s
        took_s = now_s - began_s
        decodes = [piece for piece in batch if piece.decodes and not piece.background]
        newest = decodes[-SAMPLES_MAX:]
        peer.decode_waits.add_all([now_s - piece.queued_s for piece in newest])
        for piece in decodes:
            piece.computed_s += took_s
            piece.waited_s += began_s - piece.queued_s
        if not batch[-1].background:  # such rows, the last of a batch, wait on purpose
            peer.sizer.ran(peer.rows, took_s, decodes_only=peer.decodes_only)

    def _at_last(self, piece: SimulatedPiece, hop: SimulatedHop, tokens: PiecesByLink) -> None:
        """At the last stage: send the session's new token to the first stage."""
        piece.computed_s = piece.waited_s = 0.0
        if self._hub:
            tokens.setdefault(hop.link, []).append(piece)
            return
        if self._ran(piece):
            self._to_first(piece.session, hop, tokens)

    def _to_first(self, session: SimulatedSession, hop: SimulatedHop, tokens: PiecesByLink) -> None:
        first = session.entry
        session.decode.hop = first
        link = hop.link
        if hop.following is not first:  # the session goes on over other stages
            same = first.peer is hop.peer
            link = None if same else self.link(hop.peer.name, first.peer.name)
        tokens.setdefault(link, []).append(session.decode)

    def _at_clients(self, pieces: Iterable[SimulatedPiece]) -> None:
        """With a hub: count tokens that reached the clients' host, and send them on."""
        frames: dict[SimulatedLink, list[SimulatedPiece]] = {}
        for piece in pieces:
            if not piece.dead and self._ran(piece):
                session = piece.session
                session.decode.hop = session.entry
                link = self.link(SOURCE, session.entry.peer.name)
                frames.setdefault(link, []).append(session.decode)
        for link, group in frames.items():
            size_bytes = self._id_bytes * sum(piece.tokens for piece in group)
            link.send(group, size_bytes, TrafficClass.CONTROL)

    def _ran(self, piece: SimulatedPiece) -> bool:
        """Count a piece that has passed all stages; returns whether a token goes round next."""
        session, observer = piece.session, self._observer
        session.tokens_in_kv += piece.tokens
        if not piece.final or observer is None:
            return False
        now_s, issued_s = self.now_s, session.issued_s
        session.issued_s = now_s
        if piece.prefill:
            session.prompt = []
            session.prompting = False
            observer.prompt_done(session, now_s + (0.0 if self._hub else session.answer_s))
            return bool(session.hops) and not session.waits
        if piece.tokens != 1 and session.decode is piece:
            session.decode = SimulatedPiece(session, 1, prefill=False)
        session.left_tokens -= 1
        observer.token_done(session, now_s, issued_s)
        if session.left_tokens == 0:
            observer.session_done(session, now_s)
            self._leave(session)
            return False
        return bool(session.hops) and not session.waits


def _rows(batch: list[SimulatedPiece]) -> tuple[int, int, int, float]:
    """Decodes, the sum of their contexts, prefill rows, and the mean context before those."""
    decodes = context = prefill = before = 0
    for piece in batch:
        if piece.prefill or piece.tokens != 1:
            prefill += piece.tokens
            before += piece.tokens * piece.position
        else:
            decodes += 1
            context += piece.session.tokens_in_kv
    return decodes, context, prefill, before / prefill if prefill else 0.0
