"""Tries strangers' grammars in processes of their own, in turns, and remembers what came of it."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from dht.errors import NetworkError
from dht.grammars.starters import starter_of
from dht.grammars.turns import Turn, Turns
from dht.process.newest import Newest


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLimits:
    cpu_s: float = 0.3
    """Processor time of a trial; a grammar that needs more is refused. Common ones take a hundredth
    of a second, the largest schemas that a request may have six."""
    at_once: int = 3
    queued_s_max: float = 4.0
    """Seconds of processor time that may wait before each slot."""
    answer_s: float = 6.0
    """Time for turn and trial together: a client waits 10 s for a whole route
    (``client/session/attempt.py``) and would blame the stage."""
    remembered_max: int = 4096
    """Grammars whose trial is remembered; the one unused for longest is forgotten first."""


class TrialsBusyError(NetworkError):
    """A grammar was not tried, for want of time; another try may go better."""


class OutOfTimeError(Exception):
    """A trial took all the processor time that it had."""


class GrammarTrials:
    """Finds out what is wrong with grammars. Used on the event loop."""

    def __init__(self, limits: TrialLimits | None = None) -> None:
        self._limits = limits = limits or TrialLimits()
        most = limits.remembered_max
        self._faults: Newest[bytes, str] = Newest(most)
        """Why a grammar cannot be followed, or an empty text, by its hash."""
        self._accepted: Newest[str, None] = Newest(most)
        """Clients of which a grammar passed, which has them go before those of which none did."""
        self._costly: Newest[str, None] = Newest(most)
        """Clients of which a trial took all its time, which has them go after all others."""
        self._trying: dict[bytes, asyncio.Lock] = {}
        self._lane = Lane(limits.at_once, limits.cpu_s, limits.queued_s_max)
        self._starter = starter_of(self)

    async def fault(self, client: str, grammar: bytes, standing: int = 0) -> str:
        """Why ``grammar`` cannot be followed, or an empty text.

        Each ``client`` has its turns; who has the higher ``standing`` goes first. Raises
        TrialsBusyError.
        """
        key = hashlib.sha256(grammar).digest()
        if (fault := self._remembered(key)) is not None:
            return fault
        lock = self._trying.setdefault(key, asyncio.Lock())
        try:
            async with asyncio.timeout(self._limits.answer_s), lock:
                if (fault := self._remembered(key)) is None:  # not another's, meanwhile
                    fault = self._faults[key] = await self._tried(client, grammar, standing)
        except TimeoutError:
            raise TrialsBusyError("too many grammars are being read here") from None
        finally:
            if not lock.locked() and self._trying.get(key) is lock:
                del self._trying[key]
        if not fault:
            self._accepted[client] = None
        return fault

    def _remembered(self, key: bytes) -> str | None:
        if (fault := self._faults.get(key)) is not None:
            self._faults[key] = fault  # used again: forgotten later
        return fault

    def standing(self, client: str) -> int:
        """Above 0 where a grammar of ``client`` passed here, below 0 where one took too long."""
        return (client in self._accepted) - (client in self._costly)

    async def _tried(self, client: str, grammar: bytes, standing: int) -> str:
        with suppress(OutOfTimeError):
            async with self._lane.turn(client, standing + self.standing(client)):
                return await self._try(grammar)
        self._costly[client] = None
        self._lane.turns.lower(client)
        return "it takes too much time or memory to read, or nests too deep"

    async def _try(self, grammar: bytes) -> str:
        """What a process of its own says of the grammar.

        Raises TrialsBusyError, and OutOfTimeError where it says nothing.
        """
        try:
            said = await self._starter.said_of(grammar, self._limits.cpu_s)
        except OSError as error:
            raise TrialsBusyError(f"no grammar is tried here: {error}") from None
        read, _, fault = said.decode(errors="replace").partition("\n")
        if read.strip() == "read":
            return fault.strip()
        raise OutOfTimeError


class Lane:
    """Slots for work that strangers ask for, and who waits for them."""

    def __init__(self, at_once: int, work_s: float, queued_s_max: float) -> None:
        self.turns = Turns(at_once=at_once, work_s=work_s, queued_s_max=queued_s_max)
        self._waits: dict[Turn, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def turn(self, client: str, standing: int) -> AsyncIterator[None]:
        """A slot, when it is ``client``'s turn; raises TrialsBusyError for a full queue."""
        loop = asyncio.get_running_loop()
        turn, refused = self.turns.ask(client, standing)
        self._waits[turn] = loop.create_future()
        if refused is not None and not self._waits[refused].done():  # else it was just given up
            full = TrialsBusyError("too many grammars wait to be read here")
            self._waits[refused].set_exception(full)
        began_s = loop.time()
        try:
            self._begin()
            await self._waits[turn]
            began_s = loop.time()
            yield
        finally:
            del self._waits[turn]
            self.turns.leave(turn, loop.time() - began_s)
            self._begin()

    def _begin(self) -> None:
        while (turn := self.turns.begin()) is not None:
            wait = self._waits[turn]
            if not wait.done():  # else it was given up, and leaves by itself
                wait.set_result(None)
