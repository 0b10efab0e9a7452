"""``python -m node.profile MODEL`` prints the speed that a peer here would announce."""

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict

from dht.checkpoints.hub import served_name
from dht.command_line import EXIT_DONE, Parser, command_of
from node.device.hardware import machine_of
from node.engine.engine import Engine, EngineConfig
from node.model.opening import open_lean
from node.owner.reporter import counted
from node.profiling.layer_profile import measure, tokens_per_s
from node.profiling.quicker_dtype import default_dtype


def parse() -> argparse.Namespace:
    """The command's arguments; raises UserError."""
    parser = Parser(
        prog="python -m node.profile",
        description="Measure how fast this machine runs a model's layers, without joining.",
        epilog="example: %(prog)s models/brook --cpu",
        exit_codes="0 done, 2 your mistake, 3 the hub cannot be reached",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="directory in Hugging Face layout, or a hub id"
    )
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--gpu", type=int, metavar="N", help="compute on GPU number N")
    device.add_argument("--cpu", action="store_true", help="compute on the CPU (default)")
    parser.add_argument("--memory", type=float, metavar="GIB", help="as for join")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser.parse_args()


async def main(arguments: argparse.Namespace) -> int:
    machine = machine_of(arguments.gpu, arguments.memory)
    store = await asyncio.to_thread(open_lean, arguments.model)
    config = EngineConfig(
        store=store,
        name=served_name(arguments.model),
        device=machine.torch_device,
        dtype=default_dtype(store, machine, None).dtype,
        memory_bytes=machine.lend_bytes,
    )
    engine = Engine(config)
    started_s = time.perf_counter()
    profile = measure(engine)
    took_s = time.perf_counter() - started_s
    rates = tokens_per_s(engine, profile)
    if arguments.json:
        fields = {
            "device": machine.device.name,
            "dtype": config.dtype,
            "memory_bytes": config.memory_bytes,
            "layers": engine.spec.layers,
            "layers_max": engine.layers_max,
            "seconds": round(took_s, 3),
            **asdict(profile),
            "fit_error": profile.fit_error,
            "tokens_per_s": list(rates),
        }
        print(json.dumps(fields))
        return EXIT_DONE
    print(
        f"{machine.device.name}, {config.dtype}, {config.memory_bytes / 2**30:.2f} GiB:"
        f" up to {engine.layers_max} of {engine.spec.layers} layers; measured in {took_s:.1f} s"
    )
    layer = profile.fit
    for timing in (*profile.points, *profile.checks):
        fitted_s = layer.seconds(timing.batch, timing.context_tokens)
        print(
            f"  one layer, batch of {timing.batch}, context {timing.context_tokens}:"
            f" {timing.seconds * 1e3:.3f} ms (fit {fitted_s * 1e3:.3f})"
        )
    if profile.fit_error is not None:
        print(f"  between points the fit is off by at most {profile.fit_error:.0%}")
    for layers, best in enumerate(rates, start=1):
        print(f"  {counted(layers, 'layer')}: {best:.0f} tokens/s")
    return EXIT_DONE


run = command_of(parse, main)

if __name__ == "__main__":
    sys.exit(run())
