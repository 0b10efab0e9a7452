"""Simulates decode-first links in closed form: the project's link scheduler without its frames.

A decode waits for the frame being sent and for earlier decodes; a prompt gets the time that decodes
leave, and a share of its own where they leave none. Only prompts need events. Tests check it
against the scheduler itself, frame by frame (:mod:`coordinator.simulator.links.project_wire`).
"""

from collections import deque

from coordinator.links.scheduler import FRAME_BYTES_MAX, FRAME_BYTES_MIN, FRAME_US, Shares
from coordinator.simulator.core.event_loop import SwarmSimulation
from coordinator.simulator.core.parts import SimulatedChunk, SimulatedHop, SimulatedLink


class FramedWire:
    """The sender of one directed link, in closed form."""

    __slots__ = (
        "_decodes_until_s",
        "_engine",
        "_frame_s",
        "_link",
        "_prompt_until_s",
        "_prompts",
        "_share",
    )

    def __init__(self, engine: SwarmSimulation, link: SimulatedLink) -> None:
        self._engine = engine
        self._link = link
        wanted = link.bytes_per_s * FRAME_US / 1e6
        frame_bytes = min(max(wanted, FRAME_BYTES_MIN), FRAME_BYTES_MAX)
        self._frame_s = frame_bytes / link.bytes_per_s
        self._share = Shares().prefill
        self._decodes_until_s = 0.0
        self._prompts: deque[tuple[SimulatedChunk, SimulatedHop, float]] = deque()
        self._prompt_until_s = 0.0

    def offer(self, piece: SimulatedChunk, hop: SimulatedHop) -> None:
        """Queue a piece. A decode's arrival is known at once, a prompt's when it has left."""
        engine, link = self._engine, self._link
        now_s = engine.now_s
        tokens = piece.tokens
        took_s = link.token_s if tokens == 1 else tokens * link.token_s
        link.pieces += 1
        link.busy_s += took_s
        if piece.prefill:
            self._prompts.append((piece, hop, now_s))
            if len(self._prompts) == 1:
                self._begin()
            return
        start_s = self._decodes_until_s
        prompts = self._prompts
        if start_s > now_s:
            link.waited_s += start_s - now_s
            end_s = start_s + took_s
            if prompts:  # decodes queue up: the prompt sends its share between them
                self._decodes_until_s = start_s + took_s / (1 - self._share)
                self._prompt_until_s += took_s
            else:
                self._decodes_until_s = end_s
        elif prompts:
            start_s = now_s + (self._prompt_until_s - now_s) % self._frame_s
            link.waited_s += start_s - now_s
            self._decodes_until_s = end_s = start_s + took_s
            self._prompt_until_s += took_s
        else:
            start_s = now_s
            self._decodes_until_s = end_s = now_s + took_s
        piece.sent_s = start_s
        following = hop.following
        if following is None or piece.dead or tokens != 1:
            engine.arrive(piece, hop, end_s + link.latency_s)
            return
        # SwarmSimulation.arrive inlined: a simulated minute comes here millions of times.
        piece.hop = following
        end_s += link.latency_s
        piece.arrives_s = end_s
        link.arrivals.append(piece)
        target = link.target
        if not target.busy and end_s < target.wake_s:
            engine.wake_at(target, end_s)

    def _begin(self) -> None:
        piece, _, offered_s = self._prompts[0]
        now_s = self._engine.now_s
        start_s = max(now_s, self._decodes_until_s)
        self._link.waited_s += start_s - offered_s
        piece.sent_s = start_s
        self._prompt_until_s = start_s + piece.tokens * self._link.token_s
        self._engine.call_at(self._prompt_until_s, self._end)

    def _end(self) -> None:
        now_s = self._engine.now_s
        if self._prompt_until_s > now_s:  # decodes went first meanwhile
            self._engine.call_at(self._prompt_until_s, self._end)
            return
        piece, hop, _ = self._prompts.popleft()
        self._engine.arrive(piece, hop, now_s + self._link.latency_s)
        if self._prompts:
            self._begin()
