"""All attacks at once, for a long time: does anything fail, and does memory stay flat?"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from rich.console import Console

from bench import report
from bench.fleet.peers import spread
from bench.hostile.attacks import ATTACKS
from bench.hostile.callers import Expected
from bench.hostile.honest import Side, light_is_there, said, until
from bench.hostile.rows import LEAVE_S, attackers, first_tokens_s
from bench.hostile.verdict import Growth, Limits, growth_per_min

ATTACKERS, PEERS, CALLERS = 8, 4, 4
FLOOR_S = 180.0
"""Longer than any garbage lives: the daemon's runtime collects every two minutes at the latest."""
LASTS_S = (15.0, 45.0)
"""One attack of one attacker takes a time between these; then it draws another."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One attack of the soak."""

    name: str
    from_unix_s: float
    seconds: float

    def lasts(self, unix_s: float, within_s: float) -> bool:
        """Whether it goes on at some time within ``within_s`` of ``unix_s``."""
        return (
            self.from_unix_s <= unix_s + within_s
            and unix_s <= self.from_unix_s + self.seconds + within_s
        )


async def soak(
    expected: Expected, minutes: float, seed: int, limits: Limits, say: Console
) -> dict[str, Any]:
    """Eight attackers draw attacks at random against four peers, a gateway and four callers."""
    light = int(light_is_there())
    with Side(expected, peers_wanted=PEERS + light, light_wanted=light) as side:
        await side.begin()
        await side.open_gateway()
        side.call(CALLERS - 2)
        side.call(1, formats=True)
        side.call(1, through_gateway=True)
        await until(lambda: len(side.answers()) >= CALLERS, 2 * LEAVE_S)
        from_s = time.time()
        until_s = from_s + 60.0 * minutes
        drawn: list[Drawn] = []
        sent: Counter[str] = Counter()
        async with asyncio.TaskGroup() as group:
            for number in range(ATTACKERS):
                rng = random.Random(f"{seed}/{number}")
                group.create_task(attack_on(side, rng, until_s, drawn, sent, say))
        answers = [each for each in side.answers() if each.began_unix_s >= from_s]
        failed = [
            {
                "at_min": round((each.began_unix_s - from_s) / 60, 2),
                "why": each.failed,
                "honest": side.told(each.began_unix_s - LEAVE_S, each.began_unix_s + LEAVE_S),
                "meanwhile": sorted(
                    one.name for one in drawn if one.lasts(each.began_unix_s, LEAVE_S)
                ),
            }
            for each in answers
            if each.failed is not None
        ]
        grew = growth_of(side.samples, (from_s + until_s) / 2, until_s)
        ended = side.ended()
        checks = {
            "answers": bool(answers) and not failed,
            "memory": all(each.within(limits.slope_mib_per_min) for each in grew.values()),
            "processes": not ended,
        }
        return {
            **report.code(),
            "ok": all(checks.values()),
            "checks": checks,
            "minutes": minutes,
            "seed": seed,
            "attacks": dict(Counter(one.name for one in drawn)),
            "sent": dict(sent),
            "answers": len(answers),
            "failed": failed,
            "ttft_s": spread(first_tokens_s(answers)),
            "slope_mib_per_min": {name: round(each.slope, 3) for name, each in grew.items()},
            "slope_error_mib_per_min": {name: round(each.error, 3) for name, each in grew.items()},
            "memory_mib": side.memory_mib(from_s, until_s),
            "memory_mib_each_minute": each_minute(side, from_s),
            "ended": list(ended),
            "noticed": dict(side.counters()),
        }


async def attack_on(
    side: Side,
    rng: random.Random,
    until_s: float,
    drawn: list[Drawn],
    sent: Counter[str],
    say: Console,
) -> None:
    """One attacker: attack after attack, each in a new process, until the time is over."""
    while (left_s := until_s - time.time()) > LASTS_S[0] / 2:
        drawable = [name for name in sorted(ATTACKS) if side.light_wanted >= ATTACKS[name].light]
        name, seconds = rng.choice(drawable), min(left_s, rng.uniform(*LASTS_S))
        drawn.append(Drawn(name, time.time(), seconds))
        say.print(f"{left_s:.0f} s left: {name}")
        attack = attackers(side, name, seconds)
        try:
            await until(lambda: not attack.lives, seconds + LEAVE_S)  # noqa: B023
        finally:
            attack.end()
        sent.update({k: v for k, v in said(attack.log).items() if isinstance(v, int)})


def growth_of(
    samples: Sequence[tuple[float, Mapping[str, float]]], from_s: float, until_s: float
) -> dict[str, Growth]:
    """Growth by process over a stretch, in MiB per minute, of the least that it held in each
    :data:`FLOOR_S`: what an attack takes and gives back is in the peaks."""
    floors: dict[str, dict[int, tuple[float, float]]] = {}
    for at, held in samples:
        if from_s <= at <= until_s:
            for name, mib in held.items():
                stretch = floors.setdefault(name, {})
                part = int((at - from_s) // FLOOR_S)
                stretch[part] = min(stretch.get(part, (at, mib)), (at, mib), key=itemgetter(1))
    return {name: growth_per_min([*each.values()]) for name, each in floors.items()}


def each_minute(side: Side, from_s: float) -> list[dict[str, float]]:
    """The first sample of each minute since ``from_s``."""
    found: dict[int, dict[str, float]] = {}
    for at, held in side.samples:
        if at >= from_s:
            found.setdefault(int((at - from_s) // 60), held)
    return list(found.values())
