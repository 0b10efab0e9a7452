"""Whose work runs next where strangers ask for it: turns by client, bounded in seconds. Pure.

Start-time fair queueing (Goyal, Vin and Cheng 1996): a client's next turn begins, in virtual time,
where its last one ended, so that who asks for more only waits longer behind its own. Clients whose
work was accepted before come first, since identities cost nothing.
"""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """One client's piece of work, waiting or running."""

    client: str
    standing: int
    """Above 0 where work of this client was accepted here before, below 0 where some took too
    long; the most goes first."""
    start_s: float
    """Virtual time at which it is this client's turn."""
    number: int
    """Its place among all that ever asked."""

    @property
    def rank(self) -> tuple[int, float, int]:
        """Whoever has the smallest goes first."""
        return -self.standing, self.start_s, self.number


class Turns:
    """A few slots and a bounded queue before them."""

    def __init__(self, *, at_once: int, work_s: float, queued_s_max: float) -> None:
        """``at_once`` pieces of work run, 3 at least, each of ``work_s`` seconds at most. The last
        slot is for clients with a standing above 0, the one before it for those that made nobody
        wait. Where those that wait would keep a slot for more than ``queued_s_max`` seconds, the
        last of them is refused."""
        self._at_once = at_once
        self._work_s = work_s
        self._waiting_max = max(1, int(queued_s_max * at_once / work_s))
        self._waiting: set[Turn] = set()
        self._running: set[Turn] = set()
        self._now_s = 0.0
        """Virtual time: the start of the turn that began last."""
        self._ends_s: dict[str, float] = {}
        """Virtual time at which each client's last turn ends."""
        self._asked = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def ask(self, client: str, standing: int = 0) -> tuple[Turn, Turn | None]:
        """A new turn, and the one that has to be refused for it, which may be itself."""
        start_s = max(self._now_s, self._ends_s.get(client, 0.0))
        turn = Turn(client=client, standing=standing, start_s=start_s, number=self._asked)
        self._asked += 1
        self._ends_s[client] = start_s + self._work_s
        self._waiting.add(turn)
        if len(self._waiting) <= self._waiting_max:
            return turn, None
        last = max(self._waiting, key=lambda each: each.rank)
        self.leave(last)
        return turn, last

    def begin(self) -> Turn | None:
        """The turn that begins now; None where no slot is free or nobody waits."""
        free = self._at_once - len(self._running)
        turn = min(self._waiting, key=lambda each: each.rank, default=None)
        if turn is None or free < 2 - max(-1, min(1, turn.standing)):
            return None
        self._waiting.discard(turn)
        self._running.add(turn)
        self._now_s = max(self._now_s, turn.start_s)
        self._ends_s = {name: end for name, end in self._ends_s.items() if end > self._now_s}
        return turn

    def lower(self, client: str) -> None:
        """Lower the standing of turns of ``client`` that wait: a turn of it took too long."""
        for turn in self._waiting:
            turn.standing -= turn.client == client

    def leave(self, turn: Turn, spent_s: float = 0.0) -> None:
        """End a turn that took ``spent_s`` seconds, or give it up; harmless if it has ended."""
        if turn in self._running:
            self._running.discard(turn)
        elif turn in self._waiting:
            self._waiting.discard(turn)
        else:
            return
        if (end_s := self._ends_s.get(turn.client)) is not None:
            self._ends_s[turn.client] = end_s - self._work_s + min(spent_s, self._work_s)
