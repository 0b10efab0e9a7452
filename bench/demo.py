"""``make demo``: three peers, none of which can hold the model, answer a prompt together.

Each peer is a process of its own. The demo prints who holds which layers, the plan's flow, the
text as it streams, once with a token a round and once with drafts (several tokens a round, drafted
by the small model beside the model and by what repeats), the tokens/s of both, and whether the same
model in one process says the same. All peers are on this machine: no link makes a round long. With
``--keep`` (``make swarm``) the swarm stays until Ctrl-C.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.local_swarm import ROOT, LocalSwarm, PeerStartError
from bench.reference import Reference, draft_memory_for, memory_for
from bench.starting import Watching
from client import Answer, Swarm
from dht.command_line import EXIT_INTERRUPTED
from dht.identity.peer_id import short_name
from dht.messages.types import Plan
from node.stage.draft_engine import DIRECTORY

MODEL = ROOT / "models" / "brook"
SHARES = (0.62, 0.45, 0.36)
"""Of the memory that the whole model needs: nobody can hold it."""
PROMPT = "One morning"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.demo",
        description="Three peers, none of which can hold the model, answer a prompt together.",
        epilog='example: python -m bench.demo --prompt "Once" --max-new-tokens 100',
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="its directory (models/brook)")
    parser.add_argument("--prompt", default=PROMPT, help=f"text to continue ({PROMPT})")
    parser.add_argument(
        "--max-new-tokens", type=int, default=320, metavar="N", help="of the answer (320)"
    )
    parser.add_argument("--keep", action="store_true", help="leave the swarm running until Ctrl-C")
    return parser.parse_args()


async def ask(
    console: Console, addresses: list[str], arguments: argparse.Namespace
) -> tuple[dict[str, str], dict[bool, Answer]]:
    """Connect one client and stream the answer without drafts and with them; the peers' names come
    with both."""
    async with Swarm.connect(
        addresses,
        model=str(arguments.model),
        on_status=lambda text: console.print(f"\n[dim]({text})[/dim]"),
    ) as swarm:
        await swarm.generate("Hello", max_new_tokens=2)  # the first request opens connections
        await swarm.reader.refresh()
        plan, names = swarm.view.plan, {peer: node.name for peer, node in swarm.view.nodes.items()}
        if plan is not None:
            console.print(plan_table(plan, names))
        answers = {}
        for speculate in (False, True):
            told = "several tokens a round, as drafted" if speculate else "a token a round"
            console.print(f"\n[dim]With {told}:[/dim]", highlight=False)
            console.print(f"[bold]{arguments.prompt}[/bold]", end="", highlight=False)
            running = swarm.begin(
                arguments.prompt, max_new_tokens=arguments.max_new_tokens, speculate=speculate
            )
            async for piece in running:
                console.print(piece.text, end="", highlight=False, markup=False, soft_wrap=True)
            console.print("\n")
            answers[speculate] = running.answer()
        return names, answers


def plan_table(plan: Plan, names: dict[str, str]) -> Table:
    """Who holds which layers, and the flow over each."""
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
            f"{assignment.start}-{assignment.end - 1} of {plan.model.layers}",
            f"{inflow:.0f}",
        )
    return table


def main() -> int:
    arguments = parse()
    console = Console()
    try:
        return run(console, arguments)
    except PeerStartError as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
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
        soft_wrap=True,
        highlight=False,
    )
    with LocalSwarm(arguments.model) as swarm:
        watching = Watching(console, swarm)
        for index, share in enumerate(shares):
            name = f"volunteer-{index + 1}"
            extra = ("--draft", str(arguments.model / DIRECTORY)) if drafter else ()
            lent_gib = (share + drafter) / 2**30
            watching.until_listening(swarm.start_peer(memory_gib=lent_gib, name=name, extra=extra))
        watching.until_settled()
        console.print(f"All three serve after {watching.elapsed_s:.0f} s. Asking them …\n")
        names, answers = asyncio.run(ask(console, swarm.addresses, arguments))
        plain, drafted = answers[False], answers[True]
        route = " → ".join(
            f"{names.get(stage.peer_id, short_name(stage.peer_id))} [{stage.start}, {stage.end})"
            for stage in drafted.route
        )
        console.print(
            f"{len(drafted.token_ids)} tokens, first after {drafted.ttft_s * 1e3:.0f} ms, over"
            f" {route}: {1 / drafted.tpot_s:.1f} tokens/s with drafts, {1 / plain.tpot_s:.1f}"
            f" without ({plain.tpot_s / drafted.tpot_s:.2f} ×).",
            soft_wrap=True,
            highlight=False,
        )
        console.print("Comparing with transformers' generate in one process …", style="dim")
        reference = Reference.load(arguments.model)
        prompt_ids = reference.encode(arguments.prompt)
        reference.greedy(prompt_ids, 4)  # what runs first is slow for everybody
        expected, single_s = reference.greedy(prompt_ids, arguments.max_new_tokens)
        identical = tuple(expected) == plain.token_ids == drafted.token_ids
        console.print(
            f"One process, transformers' generate: {len(expected) / single_s:.1f} tokens/s;"
            f" its text and both of the swarm's are {'identical' if identical else 'DIFFERENT'}.",
            soft_wrap=True,
            highlight=False,
        )
        if arguments.keep:
            keep(console, swarm, arguments.model)
    console.print("All peers have left.")
    return 0 if identical else 1


def keep(console: Console, swarm: LocalSwarm, model: Path) -> None:
    """Leave the peers running until Ctrl-C, with the command that asks them."""
    console.print(
        "\nThe swarm keeps running; Ctrl-C ends it. Ask it from another terminal:\n"
        f"  .venv/bin/python -m client.generate --model {model}"
        f" --prompt 'Once' --initial-peers {swarm.addresses[0]}\n"
        "Serve OpenAI's interface to any program:\n"
        f"  .venv/bin/python -m client.gateway --model {model}"
        f" --initial-peers {swarm.addresses[0]}\n"
        "See whether it is healthy, at http://127.0.0.1:8080/:\n"
        f"  .venv/bin/python -m client.health --model {model}"
        f" --initial-peers {swarm.addresses[0]}\n"
        "Another peer joins with:\n"
        f"  .venv/bin/python -m node.join --cpu --model {model} --identity /tmp/guest.key"
        f" --initial-peers {swarm.addresses[0]}",
        soft_wrap=True,
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
