"""One attack after the other against one honest side, a row each."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from bench import report
from bench.fleet.peers import spread
from bench.hostile.attacker import MODEL
from bench.hostile.attacks import ATTACKS, Row
from bench.hostile.callers import Expected
from bench.hostile.honest import MODULE, Helper, Side, joined, said, until
from bench.hostile.verdict import Asked, Limits, Measured, between, left_mib, row
from bench.report import percentile
from testing.local_swarm import LocalPeer, end_group

CALLERS = 2
LEAVE_S = 60.0
"""How long a process may take to start and end, on a machine that is busy."""
ATTACKERS_NICE = 19
"""Attackers have machines of their own elsewhere: here they get what the honest side leaves."""
ESCAPE = "\x1b"
KEPT = "memory_after"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of each part of a row."""

    baseline_s: float
    attack_s: float | None
    """None: what the row says."""
    after_s: float
    """The most that memory may take to be back."""


def attackers(side: Side, name: str, seconds: float) -> Helper:
    """Start an attack in a process of its own."""
    command = ["--attack", name, "--seconds", f"{seconds:g}"]
    command += ["--gateway", side.gateway] if side.gateway else []
    return side.run(f"attack-{name}", MODULE, *command, nice=ATTACKERS_NICE)


def first_tokens_s(asked: Sequence[Asked]) -> list[float]:
    return [each.ttft_s for each in asked if each.ttft_s is not None]


def p95_s(asked: Sequence[Asked]) -> float | None:
    """95th percentile of times to the first token; None: there were none."""
    times_s = first_tokens_s(asked)
    return round(percentile(times_s, 0.95), 3) if times_s else None


@dataclass(slots=True)
class Playing:
    """Plays rows; a side that an attack harmed is replaced for the next one."""

    expected: Expected
    timing: Timing
    limits: Limits
    say: Console
    _side: Side | None = None
    _kind: tuple[bool, bool, bool] = (False, False, False)
    """Whether the side has a gateway, callers that ask in formats, and a light peer."""
    _before: list[Asked] = field(default_factory=list)
    _calm_mib: float = 0.0

    async def play(self, name: str) -> dict[str, Any]:
        """One row: the attack, what the honest side lost, and the verdict.

        Where nothing but memory is left over, the attack is played again on the same peers: what
        it keeps grows again; what a process needed once, or its allocator keeps for later, does
        not. The verdict is then the second one's, beside what was kept after the first.
        """
        first = await self._play(name)
        if first["ok"] or any(not holds for c, holds in first["checks"].items() if c != KEPT):
            await self._done(first)
            return first
        again = await self._play(name)
        await self._done(again)
        return again | {"first": first}

    async def _done(self, row: dict[str, Any]) -> None:
        """Peers that an attack harmed are not used again."""
        if not row["ok"]:
            await self.close()

    async def _play(self, name: str) -> dict[str, Any]:
        wanted = ATTACKS[name]
        side = await self._ready(wanted)
        seconds = self.timing.attack_s or wanted.seconds
        counted, from_s = side.counters(), time.time()
        self.say.print(f"{name}: {seconds:.0f} s")
        attack, newcomer = attackers(side, name, seconds), side.newcomer()
        commands = Commands(side, from_s + seconds) if wanted.command else None
        await until(lambda: not attack.lives, seconds + LEAVE_S)
        until_s, look = time.time(), await side.look()
        attack.end()
        came_in = await until(lambda: newcomer.process.poll() is not None, LEAVE_S)
        measured_join = joined(newcomer, len(side.peers)) and came_in
        end_group(newcomer.process.pid)
        back_mib = self.limits.after_mib + self._calm_mib
        await until(
            lambda: left_mib(side.memory_mib(from_s, time.time())) <= back_mib,
            until_s + self.timing.after_s - time.time(),
        )
        answers = side.answers()
        during = between(answers, from_s, until_s)
        whole = between(answers, from_s, time.time())
        measured = Measured(
            answers=len(whole),
            failed=tuple(each.failed for each in whole if each.failed is not None),
            ttft_before_p95_s=p95_s(self._before),
            ttft_during_p95_s=p95_s(during),
            memory_mib=side.memory_mib(from_s, time.time()),
            calm_mib=self._calm_mib,
            ended=side.ended(),
            joined=measured_join,
            peers=len(side.peers),
            following=look.following,
            led_by_stranger=side.leader() not in side.ids,
            steered=sum(each.planner not in {"", *side.ids} for each in during),
            gained=int(said(attack.log).get("gained", 0)),
            escapes=commands.escapes() if commands else 0,
        )
        return {
            **report.code(),
            "what": wanted.what,
            "seconds": seconds,
            "sent": dict(said(attack.log)) or attack.log.read_text(errors="replace")[-500:],
            "ttft_before_s": spread(first_tokens_s(self._before)),
            "ttft_during_s": spread(first_tokens_s(during)),
            "noticed": {k: v for k, v in (side.counters() - counted).items() if v > 0},
            "newcomer": seconds_of(newcomer, from_s),
            "planner_of_a_new_client": "honest" if look.planner in side.ids else look.planner,
            **row(measured, self.limits),
        }

    async def _ready(self, wanted: Row) -> Side:
        """A side that nothing harmed, with callers that have asked for a while already."""
        kind = (wanted.gateway, wanted.formats, wanted.light)
        if self._side is not None and self._kind == kind:
            return self._side
        await self.close()
        self._side = side = Side(self.expected, light_wanted=int(wanted.light)).__enter__()
        self._kind = kind
        await side.begin()
        if wanted.gateway:
            await side.open_gateway()
        side.call(CALLERS, through_gateway=wanted.gateway, formats=wanted.formats)
        await until(lambda: len(side.answers()) >= 2 * CALLERS, 2 * LEAVE_S)
        # All that a row has but the attack: once to get warm, once to be compared with.
        for _ in range(2):
            from_s = time.time()
            newcomer = side.newcomer()
            await until(lambda: newcomer.process.poll() is not None, LEAVE_S)  # noqa: B023
            end_group(newcomer.process.pid)
            await side.look()
            await asyncio.sleep(self.timing.baseline_s)
        held = side.memory_mib(from_s, time.time()).values()
        self._calm_mib = max(0.0, *(after - before for before, _, after in held))
        # A newcomer takes processors that would be its own elsewhere, with an attack or without.
        self._before = between(side.answers(), from_s, from_s + self.timing.baseline_s)
        return side

    async def close(self) -> None:
        """End the honest side."""
        if self._side is not None:
            await asyncio.to_thread(self._side.__exit__, None, None, None)
        self._side = None


class Commands:
    """Somebody who asks by the command, again and again, at a terminal that is a file here."""

    def __init__(self, side: Side, until_unix_s: float) -> None:
        self._side = side
        self._asked: list[Helper] = []
        self._task = asyncio.create_task(self._ask(until_unix_s))

    async def _ask(self, until_unix_s: float) -> None:
        command = ("--model", str(MODEL), "--prompt", "Once", "--max-new-tokens", "8")
        while time.time() < until_unix_s:
            asked = self._side.run("command", "client.generate", *command)
            self._asked.append(asked)
            await until(lambda asked=asked: not asked.lives, LEAVE_S)  # type: ignore[misc]

    def escapes(self) -> int:
        """Characters that begin orders to a terminal, in all that was written."""
        self._task.cancel()
        for each in self._asked:
            each.end()
        return sum(each.log.read_text(errors="replace").count(ESCAPE) for each in self._asked)


def seconds_of(newcomer: LocalPeer, from_unix_s: float) -> dict[str, Any]:
    """When a newcomer was in and had looked around, since the attack's begin."""
    return {
        event: None
        if (found := newcomer.find(event)) is None
        else round(found["unix_s"] - from_unix_s, 2)
        for event in ("listening", "test")
    }


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Which rows hold, and which conditions the others break."""
    broken = {
        name: [check for check, holds in each["checks"].items() if not holds]
        for name, each in rows.items()
        if not each["ok"]
    }
    return {"rows": len(rows), "ok": len(rows) - len(broken), "broken": broken}
