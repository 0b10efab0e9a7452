"""A fleet of real peers on this machine, and what people see of it.

Every peer is a ``node.join`` of the bundled model that knows the founder's address alone; every
client is new and enters by the address of one living peer. A run starts the fleet and waits until
each peer has layers or knows why not. It watches for a while with nobody asking, and asks once
through every peer. Then it kills the leader and the founder together (SIGKILL), and asks once more
through all that are left. If the founder leads, the next oldest dies with it. With --churn peers
come, leave and are killed for --minutes while clients ask.
"""

import argparse
import asyncio
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import report
from bench.fleet.clients import Asked, Clients, expected_answers, figures, seconds_to_answer
from bench.fleet.peers import SETTLE_S, Fleet, Member, quiet, spread, swarm_of
from dht.command_line import EXIT_DONE, EXIT_INTERRUPTED, loop_factory, on_interrupt
from testing.local_swarm import Start, spawned

BOTH = "kill leader and founder"
STRIKES = ("join", "leave", "kill leader", "kill founder", BOTH, "kill another")
LOST_MAX_SHARE = 0.25
"""Maximum share of the fleet that may be missing; beyond it, strikes wait for those who replace the
lost."""
AGAIN_S = (1.0, 8.0)
"""A lost peer is replaced after a time between these."""
WRONG = ("disagreements", "untold", "never_joined", "ended_unasked", "left_badly")
"""Lists that should be empty, of peers and of what kept them from one plan."""
SEEN = ("failed", "hangs")
"""Lists of answers that should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """What a round does; times in seconds."""

    peers: int = 12
    every_s: float = 2.5
    """Between two starts; 0 starts all at once."""
    memory_gib: float = 0.012
    ask_every_s: float = 2.0
    quiet_s: float = 30.0
    """Time for which the idle fleet is watched; 0 leaves that out."""
    churn_s: float = 0.0
    """Time for which peers come and go; 0 is the short script."""
    strike_every_s: float = 20.0
    """Between two strikes of the churn, on average."""
    seed: int = 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.fleet",
        usage="%(prog)s [--peers N] [--churn --minutes M] [options]",
        description="Real peers on this machine, and what people see of them: starts a fleet, asks"
        " through every peer, kills leader and founder together and asks again.",
        epilog="example: python -m bench.fleet --peers 12 --out bench/results/fleet_12.json"
        " | exit codes: 0 nothing went wrong, 1 something did, 130 interrupted",
    )
    add, usual = parser.add_argument, FleetOptions()
    add("--peers", type=int, default=usual.peers, metavar="N", help="such as 12, 24 or 40 (12)")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument(
        "--every", type=float, default=usual.every_s, metavar="S", help="between two starts (2.5)"
    )
    pace.add_argument("--at-once", action="store_true", help="start all once the founder listens")
    add("--memory", type=float, default=usual.memory_gib, metavar="GIB", help="of each (0.012)")
    add("--ask-every", type=float, default=usual.ask_every_s, metavar="S", help="seconds (2)")
    add("--quiet", type=float, default=usual.quiet_s, metavar="S", help="nobody asks (30; 0: none)")
    add("--churn", action="store_true", help="peers come, leave and are killed for --minutes")
    add("--minutes", type=float, default=5.0, metavar="M", help="of churn (5)")
    add(
        "--strike-every",
        type=float,
        default=usual.strike_every_s,
        metavar="S",
        help="between two strikes of the churn, on average (20)",
    )
    add("--rounds", type=int, default=1, metavar="N", help="runs, each with a new fleet (1)")
    add("--resume", action="store_true", help="continue with the runs in --out")
    add("--seed", type=int, default=0, metavar="N", help="of the churn (0)")
    add("--out", type=Path, metavar="FILE", help="write the result as JSON after each run")
    add("--note", default="", metavar="TEXT", help="said in the result, as of a shared machine")
    arguments = parser.parse_args()
    if arguments.peers < 3 or arguments.rounds < 1 or arguments.minutes <= 0:
        parser.error("--peers must be at least 3, --rounds at least 1, --minutes more than 0")
    return arguments


class Round:
    """One fleet from its first peer to its end."""

    def __init__(self, fleet: Fleet, clients: Clients, options: FleetOptions, say: Console) -> None:
        self.fleet = fleet
        self.clients = clients
        self._options = options
        self._say = say
        self._rng = random.Random(options.seed)
        self._again: list[asyncio.Task[None]] = []
        self.strikes: list[dict[str, Any]] = []
        self.spells: list[dict[str, Any]] = []
        self._agreed_unix_s = 0.0
        self.result: dict[str, Any] = {
            "seed": options.seed,
            "quiet": None,
            "agreed_after_kill_s": None,
            "disagreements": [],
            "yet_to_move": [],
            "looks": [],
        }

    async def run(self) -> dict[str, Any]:
        """All of it; returns the figures."""
        options, fleet = self._options, self.fleet
        self._say.print(f"starting {options.peers} peers")
        await fleet.fill(options.peers, options.every_s)
        started_unix_s = fleet.members[-1].started_unix_s
        await fleet.settle()
        self.result["agreed_s"] = await fleet.agreed_s(started_unix_s)
        self._note_disagreement("after the start")
        self._tell("settled")
        if options.quiet_s:
            self.result["links_measured"] = await fleet.links_measured()
            self.result["quiet"] = await quiet(fleet, options.quiet_s)
        try:
            await (self._churn() if options.churn_s else self._script())
        finally:
            for task in self._again:
                task.cancel()
        await fleet.settle()
        return self._figures()

    async def _script(self) -> None:
        """Ask through all, kill leader and founder together, ask through all that are left."""
        await self.clients.ask_times(len(self.fleet.living))
        self._strike(BOTH)
        async with asyncio.TaskGroup() as group:
            agreed = group.create_task(self.fleet.agreed_s(self.strikes[-1]["unix_s"]))
            group.create_task(self.clients.ask_times(len(self.fleet.living)))
        self.result["agreed_after_kill_s"] = agreed.result()
        self._note_disagreement("after the kill")
        self._tell("struck and asked again")

    # Churn

    async def _churn(self) -> None:
        """Peers come and go at random times while clients ask."""
        until_s = time.monotonic() + self._options.churn_s
        fleet = self.fleet
        self._agreed_unix_s = fleet.changed_unix_s[-1]
        async with asyncio.TaskGroup() as group:
            agreeing = group.create_task(self._note_spells())
            asking = group.create_task(self.clients.ask_until(until_s))
            await self._strike_until(until_s)
            await asking
            await asyncio.gather(*self._again, *fleet.leaving)
            if not await fleet.until(self._all_agree, SETTLE_S):
                self._note_disagreement("after the churn")
                self.spells.append({"since_unix_s": self._next_change_unix_s(), "agreed_s": None})
            agreeing.cancel()
        self._tell("churned")

    def _note_disagreement(self, when: str) -> None:
        self.result["yet_to_move"].append(self.fleet.yet_to_move)
        self.result["looks"].append(dict(self.fleet.looks))
        if self.fleet.disagreement:
            self.result["disagreements"].append(f"{when}: {self.fleet.disagreement}")

    def _all_agree(self) -> bool:
        return self.fleet.changed_unix_s[-1] <= self._agreed_unix_s

    def _next_change_unix_s(self) -> float:
        return next(at for at in self.fleet.changed_unix_s if at > self._agreed_unix_s)

    async def _note_spells(self) -> None:
        """How long peers followed different plans each time after some came or went."""
        while True:
            await self.fleet.until(lambda: not self._all_agree(), math.inf)
            since_unix_s = self._next_change_unix_s()
            while (agreed_s := await self.fleet.agreed_s(since_unix_s)) is None:
                pass
            self._agreed_unix_s = since_unix_s + agreed_s
            self.spells.append({"since_unix_s": since_unix_s, "agreed_s": agreed_s})

    async def _strike_until(self, until_s: float) -> None:
        mean_s = self._options.strike_every_s
        while (wait_s := self._rng.uniform(0.5, 1.5) * mean_s) < until_s - time.monotonic():
            await asyncio.sleep(wait_s)
            self._replace_ended()
            kind = self._rng.choice(STRIKES)
            living = len(self.fleet.living)
            if living < (1 - LOST_MAX_SHARE) * self._options.peers:
                kind = "join"  # those who replace the lost are on their way
            elif living > self._options.peers:
                kind = self._rng.choice(STRIKES[1:])
            self._strike(kind)

    def _strike(self, kind: str) -> None:
        """Do it now; whoever is lost is replaced a little later while there is churn."""
        fleet = self.fleet
        leader, founder = fleet.leader or fleet.founder, fleet.founder
        struck: tuple[Member, ...] = ()
        match kind:
            case "join":
                fleet.start()
            case "leave" | "kill another":
                others = [m for m in fleet.living if m not in (leader, founder)]
                struck = (self._rng.choice(others or fleet.living),)
            case "kill leader":
                struck = (leader,)
            case "kill founder":
                struck = (founder,)
            case _:
                second = [member for member in fleet.living if member is not founder]
                struck = (founder, leader if leader is not founder else second[0])
        unix_s = time.time()
        if kind == "leave":
            fleet.leave(struck[0])
        elif struck:
            fleet.kill(*struck)
        names = [member.peer.name for member in struck]
        self.strikes.append({"kind": kind, "unix_s": unix_s, "peers": names})
        self._say.print(f"{kind}: {', '.join(names) or fleet.members[-1].peer.name}")
        if self._options.churn_s:
            self._again += [asyncio.create_task(self._start_later()) for _ in struck]

    async def _start_later(self) -> None:
        await asyncio.sleep(self._rng.uniform(*AGAIN_S))
        self.fleet.start()

    def _replace_ended(self) -> None:
        """Peers that ended by themselves are counted, and replaced like others."""
        for member in self.fleet.members:
            if not member.ended and not member.lives:
                member.end("ended by itself")
                self._again.append(asyncio.create_task(self._start_later()))

    # Figures

    def _figures(self) -> dict[str, Any]:
        asked = self.clients.asked
        for strike in self.strikes:
            strike["answered_s"] = seconds_to_answer(asked, strike["unix_s"])
        return self.result | {
            **self.fleet.seen(),
            "strikes": self.strikes,
            "spells": self.spells,
            "answers": [asdict(each) for each in asked],
        }

    def _tell(self, what: str) -> None:
        seen, asked = self.fleet.seen(), self.clients.asked
        self._say.print(
            f"{what}: {len(self.fleet.living)} peers live, {len(seen['untold'])} untold,"
            f" {seen['elections']} elections; {len(asked)} asked,"
            f" {sum(a.failed is not None for a in asked)} failed, {sum(a.hung for a in asked)} hung"
        )


async def run_round(
    options: FleetOptions,
    expected: dict[str, tuple[int, ...]],
    say: Console,
    start: Start = spawned,
) -> dict[str, Any]:
    """One round with a fleet of its own, which is gone at its end however that comes."""
    with swarm_of(start=start) as swarm:
        fleet = Fleet(swarm, options.memory_gib)
        clients = Clients(fleet, expected, options.ask_every_s)
        try:
            return await Round(fleet, clients, options, say).run()
        finally:
            fleet.end()


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All rounds so far; answers apart that were asked before the first kill and after it."""

    def all_of(name: str) -> list[Any]:
        return [each for round_ in rounds for each in round_[name]]

    before: list[Asked] = []
    after: list[Asked] = []
    for round_ in rounds:
        kills = (s["unix_s"] for s in round_["strikes"] if s["kind"].startswith("kill"))
        first_kill_unix_s = min(kills, default=math.inf)
        for asked in (Asked(**each) for each in round_["answers"]):
            (before if asked.asked_unix_s < first_kill_unix_s else after).append(asked)
    both = [s["answered_s"] for s in all_of("strikes") if s["kind"] == BOTH]
    spells = [s["agreed_s"] for s in all_of("spells")]
    return {
        "before_kills": figures(before),
        "after_kills": figures(after),
        "serving_s": spread(all_of("serving_seconds")),
        "peers_started": sum(r["peers_started"] for r in rounds),
        "peers_served": sum(r["peers_served"] for r in rounds),
        **{name: all_of(name) for name in WRONG},
        "agreed_s": [r["agreed_s"] for r in rounds],
        "agreed_after_kill_s": [r["agreed_after_kill_s"] for r in rounds],
        "yet_to_move": [r["yet_to_move"] for r in rounds],
        "agreed_in_churn_s": spread([each for each in spells if each is not None]),
        "never_agreed_in_churn": sum(each is None for each in spells),
        "elections": [r["elections"] for r in rounds],
        "strikes": dict(Counter(s["kind"] for s in all_of("strikes"))),
        "answered_after_both_s": spread([each for each in both if each is not None]),
        "unanswered_after_both": sum(each is None for each in both),
        "quiet": [r["quiet"] for r in rounds],
    }


def went_wrong(found: dict[str, Any]) -> bool:
    """Whether a summary has something that must not be."""
    seen = [found[part][what] for part in ("before_kills", "after_kills") for what in SEEN]
    return any(seen) or any(found[name] for name in (*WRONG, "unanswered_after_both"))


def table(found: dict[str, Any]) -> Table:
    """A summary for people."""
    shown = Table(show_header=False, title="What people saw, and what peers cost")
    for name, value in found.items():
        if isinstance(value, dict):
            for inner, each in value.items():
                shown.add_row(f"{name}: {inner}", _words(each))
        else:
            shown.add_row(name, _words(value))
    return shown


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(each)}" for name, each in value.items())
    if isinstance(value, list):
        return "\n".join(_words(each) for each in value) or "0"
    return "–" if value is None else str(value)


async def run(arguments: argparse.Namespace, result: dict[str, Any], say: Console) -> None:
    """All rounds that are still to be done; the result is written after each."""
    expected = await asyncio.to_thread(expected_answers)
    rounds = result["rounds"]
    for number in range(len(rounds), arguments.rounds):
        options = FleetOptions(
            peers=arguments.peers,
            every_s=0.0 if arguments.at_once else arguments.every,
            memory_gib=arguments.memory,
            ask_every_s=arguments.ask_every,
            quiet_s=arguments.quiet,
            churn_s=60.0 * arguments.minutes if arguments.churn else 0.0,
            strike_every_s=arguments.strike_every,
            seed=arguments.seed + number,
        )
        round_ = await run_round(options, expected, say)
        rounds.append({**report.code(), **round_})
        result["summary"] = summary(rounds)
        report.write(arguments.out, result)
        say.print(f"round {number + 1} of {arguments.rounds} is done")


async def interruptible(arguments: argparse.Namespace, result: dict[str, Any]) -> int:
    """:func:`run`, ended in order by SIGINT and SIGTERM; returns the exit code."""
    running = asyncio.create_task(run(arguments, result, Console(stderr=True)))
    with on_interrupt(running.cancel):
        await asyncio.wait({running})
    if running.cancelled():
        return EXIT_INTERRUPTED
    running.result()
    return 1 if went_wrong(result["summary"]) else EXIT_DONE


def main() -> int:
    arguments = parse()
    rounds: list[dict[str, Any]] = []
    if arguments.resume and (known := report.earlier(arguments.out)):
        if (known["peers"], known["churn"]) != (arguments.peers, arguments.churn):
            sys.exit(f"error: {arguments.out} has rounds with other --peers or --churn")
        rounds = known["rounds"]
    result = report.provenance(arguments.seed)
    result |= {"peers": arguments.peers, "churn": arguments.churn, "note": arguments.note}
    result |= {"summary": summary(rounds), "rounds": rounds}
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        code = runner.run(interruptible(arguments, result))
    Console(markup=False).print(table(result["summary"]))
    return code


if __name__ == "__main__":
    sys.exit(main())
