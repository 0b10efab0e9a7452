"""Attacks on real peers, one row each: what the attacker sent, and what the honest side lost.

Four ``node.join`` peers of the bundled model, any two of which can hold it, two callers that ask
short answers all the time (for rows on HTTP through a gateway), and an attacker in a process of
its own, all on loopback. A row holds if no answer failed and none came much later, no process
ended or kept memory, peers went on serving and following plans of their own, a newcomer could
join, and the attacker has nothing that it must not have. With ``--soak`` eight attackers draw all
attacks at random at once. A row on a light peer needs py-libp2p, here or in the environment whose
interpreter ANABRANCH_LIGHT_PYTHON names (``make light-test`` makes one); else it is left out.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import report
from bench.hostile.attacker import Target
from bench.hostile.attacks import ATTACKS, NOT_PLAYED
from bench.hostile.verdict import Limits
from dht.command_line import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    loop_factory,
    on_interrupt,
    raise_descriptor_limit,
)

SOAK_MINUTES = 30.0
AFTER_S = 150.0
"""Go's daemons collect what they no longer use within two minutes, at the latest."""
READY_S = 30.0
"""How long an attacker may take to get ready, and to put away what it made."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.hostile",
        usage="%(prog)s [--only NAME ...] [--soak [MINUTES]] [options]",
        description="Attacks on real peers of this machine, one row each, or all at once.",
        epilog=f"attacks: {', '.join(ATTACKS)} | exit codes: 0 all holds, 1 something does not,"
        " 130 interrupted",
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=tuple(ATTACKS), metavar="NAME", help="these rows (all)")
    add(
        "--soak",
        type=float,
        nargs="?",
        const=SOAK_MINUTES,
        metavar="MINUTES",
        help="all attacks at once, drawn at random (30)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the soak (0)")
    add("--baseline", type=float, default=20.0, metavar="S", help="before (20)")
    add("--seconds", type=float, metavar="S", help="of each attack (20 or 45, by attack)")
    add("--after", type=float, default=AFTER_S, metavar="S", help="until memory is back (150)")
    add("--out", type=Path, metavar="FILE", help="write the result as JSON; other rows in it stay")
    add("--note", default="", metavar="TEXT", help="said in the result, as of a shared machine")
    add("--attack", choices=tuple(ATTACKS), metavar="NAME", help="be the attacker of --peers")
    add("--peers", nargs="+", default=[], metavar="ADDR", help="whom to attack")
    add("--gateway", default="", metavar="URL", help="and where their gateway is")
    add("--ask", type=Path, help=argparse.SUPPRESS)
    add("--fresh", action="store_true", help=argparse.SUPPRESS)
    add("--formats", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


async def attack(arguments: argparse.Namespace) -> int:
    """Be an attacker; prints one line of what was sent."""
    row = ATTACKS[arguments.attack]
    if row.gateway and not arguments.gateway:
        sys.exit(f"error: {arguments.attack} goes against a gateway: give --gateway URL")
    seconds = arguments.seconds or row.seconds
    async with Target(tuple(arguments.peers), arguments.gateway, seconds) as target:
        sent = target.sent
        try:
            async with asyncio.timeout(seconds + READY_S):
                await row.attack(target)
        except TimeoutError:
            sent.refused["no time left"] += 1
        finally:
            print(json.dumps(sent.as_json()), flush=True)
    return EXIT_DONE


async def play(arguments: argparse.Namespace, result: dict[str, Any], say: Console) -> None:
    """All rows that are asked for, or the soak; the result is written after each."""
    # Not for attackers and callers, which need no tensors.
    from bench.fleet.clients import expected_answers
    from bench.hostile.rows import Playing, Timing, summary
    from bench.hostile.soak import soak

    expected = await asyncio.to_thread(expected_answers)
    limits = Limits()
    if arguments.soak is not None:
        result["soak"] = await soak(expected, arguments.soak, arguments.seed, limits, say)
        keep(arguments, result)
        return
    timing = Timing(
        baseline_s=arguments.baseline, attack_s=arguments.seconds, after_s=arguments.after
    )
    playing = Playing(expected, timing, limits, say)
    try:
        for name in arguments.only or playable():
            result["rows"][name] = found = await playing.play(name)
            result["summary"] = summary(result["rows"])
            keep(arguments, result)
            wrong = [check for check, holds in found["checks"].items() if not holds]
            say.print(f"{name}: {'ok' if found['ok'] else 'BROKEN: ' + ', '.join(wrong)}")
    finally:
        await playing.close()


def playable() -> list[str]:
    """The attacks that can be played with what is installed here."""
    from bench.hostile.honest import light_is_there

    return [name for name, row in ATTACKS.items() if not row.light or light_is_there()]


def keep(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write the result where it was asked for."""
    report.write(arguments.out, result)


async def interruptible(arguments: argparse.Namespace, result: dict[str, Any]) -> int:
    """:func:`play`, ended in order by SIGINT and SIGTERM; returns the exit code."""
    playing = asyncio.create_task(play(arguments, result, Console(stderr=True)))
    with on_interrupt(playing.cancel):
        await asyncio.wait({playing})
    if playing.cancelled():
        return EXIT_INTERRUPTED
    playing.result()
    if arguments.soak is not None:
        return EXIT_DONE if result["soak"]["ok"] else 1
    played = arguments.only or playable()
    return EXIT_DONE if all(result["rows"][name]["ok"] for name in played) else 1


def begun(arguments: argparse.Namespace) -> dict[str, Any]:
    """A result to go on with: rows that were played earlier stay, each with its own stamp."""
    earlier = report.earlier(arguments.out)
    result = report.provenance(arguments.seed)
    result |= {"note": arguments.note, "limits": asdict(Limits())}
    result |= {"not_played": NOT_PLAYED, "rows": earlier.get("rows", {})}
    return result | {key: earlier[key] for key in ("summary", "soak") if key in earlier}


def table(result: dict[str, Any]) -> Table:
    """The rows for people."""
    shown = Table(title="What attacks cost the honest side")
    heads = ("attack", "failed", "first token, s: before", "during", "MiB: peak", "after", "broken")
    for head in heads:
        shown.add_column(head, justify="left" if head in {"attack", "broken"} else "right")
    for name, row in result["rows"].items():
        shown.add_row(
            name,
            f"{len(row['failed'])} of {row['answers']}",
            str(row["ttft_before_p95_s"]),
            str(row["ttft_during_p95_s"]),
            f"{row['more_peak_mib']:.0f}",
            f"{row['more_after_mib']:.0f}",
            ", ".join(check for check, holds in row["checks"].items() if not holds),
        )
    return shown


def main() -> int:
    arguments = parse()
    raise_descriptor_limit()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        if arguments.attack:
            return runner.run(attack(arguments))
        if arguments.ask:
            from bench.hostile.callers import ask_on

            expected = json.loads(arguments.ask.read_text())
            peers = tuple(arguments.peers)
            how = (arguments.gateway, arguments.fresh, arguments.formats)
            runner.run(ask_on(peers, expected, *how))
            return EXIT_DONE
        result = begun(arguments)
        code = runner.run(interruptible(arguments, result))
    Console().print(table(result))
    if "soak" in result:
        soaked = {key: result["soak"][key] for key in ("ok", "checks", "answers", "failed")}
        Console().print({"soak": soaked})
    return code


if __name__ == "__main__":
    sys.exit(main())
