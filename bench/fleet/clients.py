"""What people see of ``bench.fleet``: fresh clients, one after another, through peers by turns."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from bench.fleet.peers import MODEL, Fleet, Member, spread
from client import Swarm, SwarmConfig
from testing.reference import Reference

PROMPTS = ("One morning", "Once upon a time there was", "The river", "Nobody knew")
NEW_TOKENS = 16
HANG_S = 5.0
"""A client that says nothing for longer, neither a token nor what it waits for, hangs."""
WAIT_S = 60.0
"""What ``client.generate --wait`` is unless somebody says otherwise."""
LIMIT_S = WAIT_S + 60.0
"""An answer that has not ended by then has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One answer as somebody saw it who typed the command. Times in seconds."""

    entry: str
    """The peer whose address was given."""
    asked_unix_s: float
    connect_s: float | None
    first_token_s: float | None
    """Since the connection stood."""
    total_s: float
    silence_s: float
    """The longest time without a token and without a word."""
    silence_after: str
    """What had been said before it."""
    failed: str | None
    entry_lost: bool
    """The peer whose address was given ended meanwhile."""

    @property
    def hung(self) -> bool:
        return self.silence_s > HANG_S

    @property
    def answered_unix_s(self) -> float | None:
        return None if self.failed else self.asked_unix_s + self.total_s


@dataclass(slots=True)
class _Signs:
    """What a client said, and when it last did."""

    since_s: float = field(default_factory=time.monotonic)
    last: str = "the command"
    silence_s: float = 0.0
    silence_after: str = ""

    def say(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self.since_s >= self.silence_s:
            self.silence_s, self.silence_after = now_s - self.since_s, self.last
        self.since_s, self.last = now_s, text


def expected_answers() -> dict[str, tuple[int, ...]]:
    """What the model alone says to each prompt."""
    reference = Reference.load(MODEL, threads=1)
    return {
        prompt: tuple(reference.greedy(reference.encode(prompt), NEW_TOKENS, ignore_eos=True)[0])
        for prompt in PROMPTS
    }


@dataclass(slots=True)
class Clients:
    """Asks through every living peer by turns, each time with a new client."""

    fleet: Fleet
    expected: dict[str, tuple[int, ...]]
    every_s: float
    asked: list[Asked] = field(default_factory=list)
    _turn: dict[str, int] = field(default_factory=dict)

    def next_entry(self) -> Member:
        """The peer whose address was not given for the longest time."""
        open_ = [member for member in self.fleet.living if member.listens]
        return min(open_, key=lambda member: self._turn.get(member.peer.name, -1))

    async def ask(self) -> Asked:
        """One short answer."""
        entry = self.next_entry()
        number = len(self.asked)
        self._turn[entry.peer.name] = number
        prompt = PROMPTS[number % len(PROMPTS)]
        signs = _Signs()
        asked_unix_s, started_s = time.time(), time.monotonic()
        connected_s: float | None = None
        first_s: float | None = None
        failed: str | None = None
        tokens: tuple[int, ...] = ()
        try:
            async with asyncio.timeout(LIMIT_S):
                async with Swarm.connect(
                    [entry.peer.address],
                    model=str(MODEL),
                    config=SwarmConfig(wait_s=WAIT_S),
                    on_status=signs.say,
                ) as swarm:
                    connected_s = time.monotonic()
                    running = swarm.begin(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True)
                    async for piece in running:
                        signs.say("a token")
                        first_s = first_s or time.monotonic()
                        tokens += piece.token_ids
                    ended_s = time.monotonic()
            if tokens != self.expected[prompt]:
                failed = f"wrong tokens: {tokens}, not {self.expected[prompt]}"
        except Exception as error:  # noqa: BLE001  (whatever a client would see is counted)
            ended_s = time.monotonic()
            signs.say("an error")
            failed = f"{type(error).__name__}: {error}"[:300]
        asked = Asked(
            entry=entry.peer.name,
            asked_unix_s=round(asked_unix_s, 3),
            connect_s=_between(started_s, connected_s),
            first_token_s=_between(connected_s, first_s),
            total_s=round(ended_s - started_s, 3),
            silence_s=round(signs.silence_s, 3),
            silence_after=signs.silence_after,
            failed=failed,
            entry_lost=not entry.lives,
        )
        self.asked.append(asked)
        return asked

    async def ask_times(self, times: int) -> list[Asked]:
        """So many, one begun ``every_s`` after the other or when that is done."""
        return [await self._ask_at_pace() for _ in range(times)]

    async def ask_until(self, until_s: float) -> None:
        """One after the other until this time of ``time.monotonic``."""
        while time.monotonic() < until_s:
            await self._ask_at_pace()

    async def _ask_at_pace(self) -> Asked:
        next_s = time.monotonic() + self.every_s
        asked = await self.ask()
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        return asked


def _between(from_s: float | None, to_s: float | None) -> float | None:
    return None if from_s is None or to_s is None else round(to_s - from_s, 3)


def seconds_to_answer(asked: list[Asked], struck_unix_s: float) -> float | None:
    """From a strike until the first answer that was begun after it; None: there was none."""
    times = [
        each.answered_unix_s - struck_unix_s
        for each in asked
        if each.asked_unix_s >= struck_unix_s and each.answered_unix_s is not None
    ]
    return round(min(times), 3) if times else None


def figures(asked: list[Asked]) -> dict[str, Any]:
    """What people saw."""
    hung = [each for each in asked if each.hung]
    failed = [each for each in asked if each.failed is not None]
    return {
        "asked": len(asked),
        "failed": [f"through {each.entry}: {each.failed}" for each in failed],
        "failed_as_the_entry_was_lost": sum(each.entry_lost for each in failed),
        "hangs": [
            f"through {each.entry}: {each.silence_s:.1f} s of silence after {each.silence_after}"
            f" (connected after {each.connect_s} s)"
            for each in hung
        ],
        "connect_s": spread([e.connect_s for e in asked if e.connect_s is not None]),
        "first_token_s": spread([e.first_token_s for e in asked if e.first_token_s is not None]),
        "total_s": spread([e.total_s for e in asked if e.failed is None]),
    }
