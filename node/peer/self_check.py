"""Whether others see this peer, as they show by what they do: its own word is not enough.

A peer that is cut off, deaf, or whose records nobody takes looks alive to itself. What counts is
that another peer has given its own record back lately, and that others call it while it serves.
Where not, its owner is told, everybody who was met is greeted, and everything is announced again.

Only silence ends the process, and only where a service starts it again: while peers that have work
here, or were here before, answer or call, starting again would find the same network. So strangers
who hide a peer's record can make it say so, and cannot make it end: they would have to keep the
honest ones from answering. Nor do their own calls keep a peer that is cut off from a new start.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from dht.errors import MachineError
from dht.process.supervision import loop_s, run_by_service
from dht.transport.interface import Contact, Transport
from node.owner.reporter import Reporter


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheckConfig:
    """Times in seconds."""

    look_s: float = 2.5
    answered_s: float = 15.0
    """Time without any answer or call above which this peer is cut off: it asks every 2 s."""
    returned_s: float = 60.0
    """Age of the last return of this peer's record above which others may not see it. Others are
    asked for it three times within that."""
    called_s: float = 150.0
    """Time without a call above which a peer that holds layers of the plan may be deaf. Its
    coordinator pings it on a new stream every 96 s (64 pings); others call more often."""
    again_s: float = 30.0
    """Time between two attempts to be seen again."""
    ends_s: float = 300.0
    """Time of silence after which a service starts the process again: attempts to be seen have had
    their chance, and loading the weights again costs a minute or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfFinding:
    """What a look found: ``trouble`` is empty where all is well."""

    trouble: str = ""
    attempt: bool = False
    """Whether to greet everybody and announce again now."""
    silent: bool = False
    """Whether nobody but strangers has answered or called for so long that only a new start is
    left."""


@dataclass(slots=True)
class SelfCheck:
    """The decision, look by look. Pure."""

    config: SelfCheckConfig = field(default_factory=SelfCheckConfig)
    _since_s: float | None = None
    _serves_since_s: float | None = None
    _attempted_s: float = -1e9

    def look(self, contact: Contact, *, serves: bool, now_s: float) -> SelfFinding:
        """What the others' last signs of life mean now. ``serves``: whether this peer holds layers
        that the plan gave it."""
        if self._since_s is None:
            self._since_s = now_s
        self._serves_since_s = (self._serves_since_s or now_s) if serves else None
        trouble = self._trouble(contact, now_s)
        attempt = bool(trouble) and now_s - self._attempted_s >= self.config.again_s
        if attempt:
            self._attempted_s = now_s
        silent = (
            bool(trouble)
            and contact.returned_s > float("-inf")
            and now_s - contact.last_s >= self.config.ends_s
        )
        return SelfFinding(trouble=trouble, attempt=attempt, silent=silent)

    def _trouble(self, contact: Contact, now_s: float) -> str:
        if not contact.others or self._since_s is None:
            return ""
        if (
            now_s - max(contact.answered_s, contact.called_s, self._since_s)
            > self.config.answered_s
        ):
            return "no other peer answers: the network may be cut"
        unseen_s = now_s - max(contact.returned_s, self._since_s)
        if unseen_s > self.config.returned_s:
            return (
                "no other peer has this peer's announcement any more, so nobody asks it; perhaps a"
                " clock is wrong"
            )
        if self._serves_since_s is None:
            return ""
        if now_s - max(contact.called_s, self._serves_since_s) > self.config.called_s:
            return (
                "nobody calls this peer any more although it serves: others may not reach its port"
            )
        return ""


class SelfChecker:
    """Looks every few seconds, and acts on what was found."""

    def __init__(
        self,
        transport: Transport,
        *,
        serves: Callable[[], bool],
        again: Callable[[], None],
        reporter: Reporter,
    ) -> None:
        """``again`` announces everything once more."""
        self._transport = transport
        self._serves = serves
        self._again = again
        self._reporter = reporter
        self._check = SelfCheck()
        self.trouble = ""
        """What is wrong now; empty where others see this peer."""

    async def run(self) -> None:
        """Look until cancelled; raises MachineError where a service is to start this peer again."""
        while True:
            await asyncio.sleep(self._check.config.look_s)
            found = self._check.look(
                self._transport.contact(), serves=self._serves(), now_s=loop_s()
            )
            self._tell(found.trouble)
            if found.attempt:
                self._transport.rejoin()
                self._again()
            if found.silent and run_by_service():
                raise MachineError(
                    f"nobody has answered this peer for {self._check.config.ends_s:.0f} s:"
                    f" {found.trouble}"
                )

    def _tell(self, trouble: str) -> None:
        if trouble == self.trouble:
            return
        self.trouble = trouble
        self._reporter.event("unseen" if trouble else "seen", reason=trouble)
        if trouble:
            self._reporter.say(f"Others do not see this peer: {trouble}. Greeting them again.")
        else:
            self._reporter.say("Others see this peer again.")
