"""``anabranch models``: the models that the network serves, and whether they are complete.

It also shows how much KV is free.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from coordinator.plans.catalogue.reading import network_models, served_models
from coordinator.plans.catalogue.served import ServedModel
from coordinator.problem.model_pin import DIGITS_MIN, named_peers
from dht.command_line import EXIT_DONE, EXIT_SWARM, Parser, command_of
from dht.networks.connecting import observe
from dht.process.terminal import print_lines
from dht.swarm_options import add_swarm, settle_swarm


def parse() -> argparse.Namespace:
    """The command's arguments; raises UserError."""
    parser = Parser(
        prog="python -m client.models",
        usage="%(prog)s [anabranch:…] [options]",
        description="List the models that a network serves, at its peers' word.",
        epilog="example: %(prog)s anabranch:…",
        exit_codes="0 done, 2 your mistake, 3 none is served or not reached",
    )
    add_swarm(parser)
    parser.add_argument("--json", action="store_true", help="a JSON list on stdout")
    arguments = parser.parse_args()
    arguments.model = None
    settle_swarm(arguments, model="", any_model=True)
    return arguments


async def main(arguments: argparse.Namespace) -> int:
    """Read the directory, then each model's own records, and print them."""
    transport = await observe(arguments.initial_peers, arguments.transport)
    try:
        named = named_peers(arguments.initial_peers)
        specs = await network_models(transport, arguments.network, named)
        models = await served_models(transport, arguments.network, specs)
    finally:
        await transport.close()
    if arguments.json:
        print(json.dumps([model.figures for model in models]))
    else:
        print_lines(table(models, arguments.network))
    return EXIT_DONE if any(model.replicas for model in models) else EXIT_SWARM


CAPTION = (
    "At most: tokens/s, all users together, of the least served layer's holders.\n"
    "Free and wanted are tokens of context that sessions may still take, or wait for."
)


def table(models: Sequence[ServedModel], network: str) -> str:
    """The models as lines for people, those that are served first."""
    if not models:
        return f"Nobody in network {network} announces a model."
    head = f"{'peers':>6}{'at most':>10}{'free':>10}{'wanted':>10}  computed in"
    lines = [f"{'  served':<26}{head}"]
    for model in sorted(models, key=lambda each: (each.replicas == 0, each.name)):
        lines += [
            f"{model.name}, fingerprint {model.spec.fingerprint[:DIGITS_MIN]}",
            f"  {_served(model):<24}{model.peers:>6}{model.tokens_per_s:>10.0f}"
            f"{model.kv_tokens_free:>10}{model.kv_tokens_wanted:>10}"
            f"  {', '.join(model.precisions) or '–'}",
        ]
    return "\n".join([*lines, CAPTION])


def _served(model: ServedModel) -> str:
    layers = model.spec.layers
    if not model.replicas:
        return f"no: {model.covered} of {layers} layers"
    if model.replicas == 1:
        return f"fragile: {layers} layers"
    return f"yes: {layers} layers, {model.replicas} times"


run = command_of(parse, main)

if __name__ == "__main__":
    sys.exit(run())
