"""``anabranch status``: who serves what, and whether the network is healthy, on one screen.

It looks as the health page does: it reads the records, pings who is in them and asks for one short
answer of its own.
"""

import argparse
import json
import sys

from client.health.history import History
from client.health.prober import Prober, ProberConfig
from client.health.words import COLUMNS
from client.remembering import remember_swarm, settled_swarm
from dht.command_line import EXIT_DONE, EXIT_SWARM, Parser, command_of
from dht.process.json_file import Json
from dht.process.terminal import print_lines
from dht.swarm_options import add_model, add_swarm, settle_swarm

PEERS_SHOWN_MAX = 16


def parse() -> argparse.Namespace:
    """The command's arguments; raises UserError."""
    parser = Parser(
        prog="python -m client.status",
        usage="%(prog)s [anabranch:…] [--model M] [options]",
        description="Show who serves which layers, whether that is healthy, and how fast it is.",
        epilog="example: %(prog)s anabranch:…",
        exit_codes="0 healthy, 2 your mistake, 3 not healthy or not reached",
    )
    add_swarm(parser)
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object (docs/health.md)")
    arguments = parser.parse_args()
    settle_swarm(arguments, model="")
    return arguments


async def main(arguments: argparse.Namespace) -> int:
    """Look once and print what is seen."""
    async with settled_swarm(arguments, wait_s=0.0) as swarm:
        remember_swarm(arguments, swarm)
        history = History(None)
        try:
            state = await Prober(swarm, history, ProberConfig()).once()
        finally:
            history.close()
    if arguments.json:
        print(json.dumps(state, ensure_ascii=False))
    else:
        print_lines(screen(state, arguments.network))
    return EXIT_DONE if state["swarm"]["healthy"] else EXIT_SWARM


def screen(state: Json, network: str) -> str:
    """The state on one screen, ``PEERS_SHOWN_MAX`` peers at most."""
    swarm, layers, plan = state["swarm"], state["layers"], state["plan"]
    fingerprint = f", fingerprint {swarm['fingerprint'][:16]}" if swarm["fingerprint"] else ""
    lines = [
        f"{swarm['model']} in network {network}{fingerprint}",
        str(state["swarm"]["sentence"]),
        f"speed: {_speed(state['probes'])}",
    ]
    if plan is None:
        lines.append("plan: nobody follows one now; peers serve the layers that they hold")
    else:
        leader = state["coordinator"]
        who = "none now" if leader is None else leader["name"]
        lines.append(
            f"capacity: about {plan['capacity_tokens_per_s']:.1f} tokens/s, all users together, by"
            f" plan {plan['version']}; coordinator: {who}"
        )
        lines.append(f"planned {plan['planned_for']}")
    shown = sorted(state["peers"], key=lambda p: (not p["counts"], p["start"], p["end"], p["id"]))
    table = [column for column in COLUMNS if column.terminal]
    lines += ["", "".join(f"{column.label:{column.terminal}}" for column in table)]
    for peer in shown[:PEERS_SHOWN_MAX]:
        lines.append("".join(f"{column.text(peer):{column.terminal}}" for column in table))
        wrong = [column.note(peer) for column in table if column.is_wrong]
        lines += [f"    {each}" for each in wrong if each]
    if len(shown) > PEERS_SHOWN_MAX:
        lines.append(f"… and {len(shown) - PEERS_SHOWN_MAX} more")
    held = f"layers: {layers['count']}, each on {_peers(layers['replica_depth'])} or more"
    return "\n".join([*lines, "", held, state["help"], *state["weak_points"]])


def _peers(count: int) -> str:
    return f"{count} {'peer' if count == 1 else 'peers'}"


def _speed(probes: Json) -> str:
    tpot_s, ttft_s = probes["tpot_p50_s"], probes["ttft_p50_s"]
    if not tpot_s:
        return "not known"
    return f"{1 / tpot_s:.1f} tokens/s for one short answer, the first after {ttft_s:.2f} s"


run = command_of(parse, main)

if __name__ == "__main__":
    sys.exit(run())
