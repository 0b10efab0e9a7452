"""``make demo``: three peers, none of which can hold the model, answer a prompt together.

Each peer is a process of its own, on this machine; links are made as slow as between towns. The
demo prints who holds which layers, the plan's flow, and the text as it streams. It asks three
times: without drafts, with drafts, and with drafts while a volunteer is killed in mid-answer.
Drafts come from a small model and from repetitions. At last it prints the speeds, and whether the
same model in one process gives the same text. With ``--keep`` (``make swarm``) the swarm stays
until Ctrl-C, over links as they are; nobody is killed.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.demo.starting import MODEL, PROMPT, ROUND_TRIP_MS, SHARES, volunteers
from client import Answer, Swarm
from dht.command_line import EXIT_INTERRUPTED
from dht.identity.peer_id import short_name
from dht.messages.types import Plan, layers_text, span_text
from testing.local_swarm import LocalPeer, LocalSwarm, PeerStartError
from testing.reference import Reference, draft_memory_for, memory_for


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.demo",
        description="Three peers, none of which can hold the model, answer a prompt together.",
        epilog='example: python -m bench.demo --prompt "Once" --max-new-tokens 100',
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="its directory (models/brook)")
    parser.add_argument("--prompt", default=PROMPT, help=f"text to continue ({PROMPT})")
    parser.add_argument(
        "--max-new-tokens", type=int, default=160, metavar="N", help="of the answer (160)"
    )
    parser.add_argument(
        "--round-trip",
        type=float,
        metavar="MS",
        help=f"of every link, 0: as this machine is ({ROUND_TRIP_MS:g}; with --keep 0)",
    )
    parser.add_argument("--keep", action="store_true", help="leave the swarm running until Ctrl-C")
    arguments = parser.parse_args()
    if arguments.round_trip is None:
        arguments.round_trip = 0.0 if arguments.keep else ROUND_TRIP_MS
    return arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the client heard."""

    names: dict[str, str]
    """The peers' names, by their ids."""
    plain: Answer
    drafted: Answer
    struck: Answer | None
    """The answer in whose middle a volunteer was killed, if one was."""
    victim: str
    """Its name; empty where nobody was killed."""
    gap_s: float
    """The longest time without a token in it."""


async def ask(
    console: Console,
    addresses: list[str],
    arguments: argparse.Namespace,
    mortal: Sequence[LocalPeer],
) -> Told:
    """Connect one client, and stream the answer without drafts, with them, and while the last stage
    of its route is killed, if that is one of the ``mortal`` peers."""
    async with Swarm.connect(
        addresses,
        model=str(arguments.model),
        on_status=lambda text: console.print(f"\n({text})", style="dim", markup=False),
    ) as swarm:
        await swarm.generate("Hello", max_new_tokens=2)  # the first request opens connections
        await swarm.reader.refresh()
        plan, names = swarm.view.plan, {peer: node.name for peer, node in swarm.view.nodes.items()}
        if plan is not None:
            console.print(plan_table(plan, names))
        plain, _ = await stream(console, swarm, arguments, "one token at a time", speculate=False)
        drafted, _ = await stream(console, swarm, arguments, "drafts, several tokens at a time")
        struck, gap_s, last = None, 0.0, drafted.route[-1].peer_id
        victim = next((peer for peer in mortal if peer.peer_id == last), None)
        if victim is not None:
            what = f"{victim.name} killed in the middle"
            struck, gap_s = await stream(console, swarm, arguments, what, victim=victim)
        return Told(
            names=names,
            plain=plain,
            drafted=drafted,
            struck=struck,
            victim=victim.name if victim is not None else "",
            gap_s=gap_s,
        )


async def stream(
    console: Console,
    swarm: Swarm,
    arguments: argparse.Namespace,
    what: str,
    *,
    speculate: bool = True,
    victim: LocalPeer | None = None,
) -> tuple[Answer, float]:
    """One answer as it comes, and its longest pause in seconds. ``victim`` is killed once half of
    it is there."""
    console.print(f"\n[dim]With {what}:[/dim]", highlight=False)
    console.print(f"[bold]{arguments.prompt}[/bold]", end="", highlight=False)
    running = swarm.begin(
        arguments.prompt, max_new_tokens=arguments.max_new_tokens, speculate=speculate
    )
    came, longest_s, newest_s = 0, 0.0, None
    async for piece in running:
        now_s = time.monotonic()
        longest_s, newest_s = max(longest_s, now_s - (newest_s or now_s)), now_s
        console.print(piece.text, end="", highlight=False, markup=False, soft_wrap=True)
        came += len(piece.token_ids)
        if victim is not None and came >= arguments.max_new_tokens // 2:
            console.print(f" [red]✝ {victim.name}[/red] ", end="")
            victim.kill()
            victim = None
    console.print("\n")
    return running.answer(), longest_s


def plan_table(plan: Plan, names: dict[str, str]) -> Table:
    """The table of who holds which layers, and the flow over each."""
    table = Table(
        title=f"Plan {plan.version} by {plan.planner}:"
        f" max flow {plan.flow_tokens_per_s:.0f} tokens/s"
    )
    for column in ("peer", "layers", "flow in, tokens/s"):
        table.add_column(column, justify="left" if column == "peer" else "right")
    for assignment in sorted(plan.assignments, key=lambda a: (a.start, a.end)):
        inflow = sum(e.tokens_per_s for e in plan.edges if e.head == assignment.peer_id)
        table.add_row(
            names.get(assignment.peer_id, short_name(assignment.peer_id)),
            f"{span_text(assignment.start, assignment.end)} of {plan.model.layers}",
            f"{inflow:.0f}",
        )
    return table


def main() -> int:
    arguments = parse()
    console = Console()
    try:
        return run(console, arguments)
    except PeerStartError as error:
        console.print(
            f"error: {error}", style="red", markup=False, soft_wrap=not console.is_terminal
        )
    except KeyboardInterrupt:
        console.print("\nStopped; all peers have left.")
        return EXIT_INTERRUPTED
    return 1


def run(console: Console, arguments: argparse.Namespace) -> int:
    """The whole demo; 0 where the swarm's text is what one process says."""
    whole, drafter = memory_for(arguments.model), draft_memory_for(arguments.model)
    shares = [share * whole for share in SHARES]
    console.print(
        f"The model needs {whole / 2**20:.1f} MiB; the three peers lend"
        f" {', '.join(f'{share / 2**20:.1f}' for share in shares)} MiB, so none can hold it."
        + (f" Each lends {drafter / 2**20:.1f} MiB more to the draft model." if drafter else "")
        + " Starting them; the first time each measures this machine, which takes longer.",
        soft_wrap=not console.is_terminal,
        highlight=False,
    )
    if arguments.round_trip:
        console.print(
            f"All run on this machine; every link is made to take {arguments.round_trip:g} ms there"
            " and back.",
            soft_wrap=not console.is_terminal,
            highlight=False,
        )
    with volunteers(console, arguments.model, arguments.round_trip) as swarm:
        mortal = () if arguments.keep else swarm.peers
        told = asyncio.run(ask(console, swarm.addresses, arguments, mortal))
        names, plain, drafted = told.names, told.plain, told.drafted
        route = " → ".join(
            f"{names.get(stage.peer_id, short_name(stage.peer_id))}"
            f" ({layers_text((stage.start, stage.end))})"
            for stage in drafted.route
        )
        console.print(
            f"{len(drafted.token_ids)} tokens, first after {drafted.ttft_s * 1e3:.0f} ms, over"
            f" {route}: {1 / drafted.tpot_s:.1f} tokens/s with drafts, {1 / plain.tpot_s:.1f}"
            f" without ({plain.tpot_s / drafted.tpot_s:.2f} ×).",
            soft_wrap=not console.is_terminal,
            highlight=False,
        )
        if told.victim:
            console.print(
                f"{told.victim} was killed in the middle: {told.gap_s:.1f} s later the answer went"
                " on over the others, which took its layers.",
                soft_wrap=not console.is_terminal,
                highlight=False,
            )
        console.print("Comparing with transformers' generate in one process …", style="dim")
        reference = Reference.load(arguments.model)
        prompt_ids = reference.encode(arguments.prompt)
        reference.greedy(prompt_ids, 4)  # what runs first is slow for everybody
        expected, single_s = reference.greedy(prompt_ids, arguments.max_new_tokens)
        texts = [each for each in (plain, drafted, told.struck) if each is not None]
        identical = all(each.token_ids == tuple(expected) for each in texts)
        console.print(
            f"One process, transformers' generate: {len(expected) / single_s:.1f} tokens/s;"
            f" its text and all of the swarm's are {'identical' if identical else 'DIFFERENT'}.",
            soft_wrap=not console.is_terminal,
            highlight=False,
        )
        if arguments.keep:
            keep(console, swarm, arguments.model)
    console.print("All peers have left.")
    return 0 if identical else 1


def keep(console: Console, swarm: LocalSwarm, model: Path) -> None:
    """Leave the peers running until Ctrl-C, with their invitation and the commands that take it."""
    invitation = swarm.peers[0].wait_for("invitation")["text"]
    anabranch = ".venv/bin/python -m anabranch"
    console.print(
        "\nThe swarm keeps running; Ctrl-C ends it. Its invitation, for another terminal:\n"
        f"  export ANABRANCH_PEERS={invitation}\n"
        "Then ask it:\n"
        f"  {anabranch} ask --prompt Once\n"
        "Serve OpenAI's interface to any program:\n"
        f"  {anabranch} serve\n"
        "See whether it is healthy, at http://127.0.0.1:8080/:\n"
        f"  {anabranch} page\n"
        "Join it with another peer:\n"
        f"  {anabranch} join --cpu --model {model} --identity ~/.anabranch/guest.key",
        soft_wrap=not console.is_terminal,
        highlight=False,
    )
    left: set[str] = set()
    try:
        while len(left) < len(swarm.peers):
            for peer in swarm.peers:
                if peer.name not in left and peer.process.poll() is not None:
                    left.add(peer.name)
                    others = len(swarm.peers) - len(left)
                    rest = "the others go on" if others else "it was the last one"
                    console.print(f"{peer.name} has ended; {rest}.")
            time.sleep(0.5)
    except KeyboardInterrupt:
        console.print("\nEnding the swarm …")


if __name__ == "__main__":
    sys.exit(main())
