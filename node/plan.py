"""``anabranch plan``: plan a living swarm, a cluster file, or GPUs that are only named.

``--gpus 3x3090,1x4070 --model M`` answers before anybody joins: whether the model fits, how fast it
would be, and what is missing. Sizes are those of the model's own files, of which the hub's are only
listed; speeds come from data sheets (:mod:`node.profiling.data_sheets`). Without ``--gpus`` the
command is that of :mod:`coordinator.plan`, whose help lists these options, too.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from textwrap import fill
from typing import Any, NoReturn

from coordinator.plan import add_search_options, main, plan_and_print
from coordinator.planning.placement import NoPlacementError, why_uncoverable
from coordinator.plans.catalogue.precision import QUANTISED
from coordinator.problem.service import announced_service
from dht.checkpoints.hub import served_name, typed_model
from dht.command_line import EXIT_USER, Parser, exit_code_of, number_in
from dht.messages.types import ModelSpec, Problem, mean_layer_bytes
from dht.process.terminal import print_lines, saying
from node.device.hardware import LENDING
from node.profiling.data_sheets import GPUS, LayerWork, parse_gpus, planner_nodes

EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of a layer's routed experts in configurations."""
MORE_MAX = 64
"""Maximum GPUs that are named as missing."""
NOTE = (
    "Speeds are from data sheets and were not measured; links count as --mbit and --ms. A machine"
    " measures itself when it joins."
)


def parse() -> argparse.Namespace:
    """The command's arguments; raises UserError."""
    parser = Parser(
        prog="python -m node.plan",
        usage="%(prog)s --gpus LIST --model MODEL [options]",
        description="Say whether GPUs would hold a model together, and how fast, before they join.",
        epilog=fill(f"known GPUs: {', '.join(GPUS)}", 79)
        + "\nexample: %(prog)s --gpus 3x3090,1x4070"
        " --model Qwen/Qwen3-32B",
        exit_codes="0 done, 2 your mistake or it does not fit, 3 no hub",
        raw=True,
    )
    parser.add_argument(
        "--model",
        type=typed_model,
        required=True,
        metavar="MODEL",
        help="a directory, a GGUF file or a hub id",
    )
    _add_named(parser)
    add_search_options(parser)
    return parser.parse_args()


def _add_named(parser: Parser, *, in_help_alone: bool = False) -> None:
    """Add the options of GPUs that are named; ``in_help_alone``: whoever gives them lacks
    ``--gpus``."""
    group = parser.add_argument_group("GPUs that are only named, with --model")

    def add(flag: str, **named: Any) -> None:
        if in_help_alone:
            shown = {"metavar": named["metavar"], "help": named["help"]}
            group.add_argument(flag, type=_alone, default=argparse.SUPPRESS, **shown)
        else:
            group.add_argument(flag, **named)

    add("--gpus", required=True, metavar="LIST", help="such as 3x3090,1x4070")
    add("--quantize", choices=QUANTISED, metavar="Q", help="weights in int8 or int4")
    positive = number_in(0, 1e6, "a positive number", above=True)
    add("--mbit", type=positive, default=100.0, metavar="M", help="of each link (100)")
    add("--ms", type=positive, default=30.0, metavar="T", help="round trip of each link (30)")


def _alone(_: str) -> NoReturn:
    raise argparse.ArgumentTypeError("goes with --gpus")


def studied(model: str, quantize: str | None) -> tuple[ModelSpec, LayerWork]:
    """A model's sizes on a GPU, and what a step of its largest layer does.

    Raises UserError and NetworkError.
    """
    from node.model.layer_range import ModelLayout
    from node.model.opening import open_lean

    layout = ModelLayout.of(open_lean(model), "bfloat16", quantize, device="cuda")
    spec = layout.spec(served_name(model))

    def experts(name: str) -> bool:
        return "expert" in name and "shared_expert" not in name

    counts = [
        (each.numel(), experts(name))
        for layer in layout.layers
        for name, each in layer.named_parameters()
    ]
    parameters = sum(size for size, _ in counts)
    routed = sum(size for size, of_expert in counts if of_expert)
    config = layout.config.get_text_config()
    total = next((n for key in EXPERTS_KEYS if (n := getattr(config, key, None))), 0)
    chosen = getattr(config, "num_experts_per_tok", None) or total
    work = LayerWork(
        weight_bytes=round(mean_layer_bytes(spec)),
        parameters=round(parameters / spec.layers),
        kv_bytes_per_token=spec.kv_bytes_per_token_layer,
        expert_share=routed / max(1, parameters) if total else 0.0,
        active_share=min(1.0, chosen / total) if total else 1.0,
    )
    return spec, work


def named_problem(
    gpus: tuple[str, ...], spec: ModelSpec, work: LayerWork, *, mbit: float, ms: float
) -> Problem:
    """The problem of ``gpus``, keys of :data:`~node.profiling.data_sheets.GPUS`, each a peer.

    All links carry ``mbit`` Mbit/s with a round trip of ``ms`` milliseconds.
    """
    return Problem(
        model=spec,
        nodes=planner_nodes(gpus, spec, work, LENDING.gpu_share),
        default_bandwidth_bytes_per_s=mbit * 1e6 / 8,
        default_rtt_s=ms / 1e3,
    )


def fewest_more(
    gpus: tuple[str, ...], kind: str, problem_of: Callable[[tuple[str, ...]], Problem]
) -> int | None:
    """The fewest GPUs of a kind that hold the model beside ``gpus``; None: above ``MORE_MAX``."""
    return next(
        (
            more
            for more in range(1, MORE_MAX + 1)
            if why_uncoverable(problem_of((*gpus, *[kind] * more))) is None
        ),
        None,
    )


def _who_is_missing(gpus: tuple[str, ...], problem_of: Callable[[tuple[str, ...]], Problem]) -> str:
    """How many more of each kind of GPU would do."""
    found = [
        f"{more} more {kind}"
        for kind in dict.fromkeys(gpus)
        if (more := fewest_more(gpus, kind, problem_of)) is not None
    ]
    return f"{' or '.join(found)} would do" if found else "far more, or larger, GPUs are needed"


def run() -> int:
    """Run ``anabranch plan``; returns its exit code."""
    named = any(each.split("=")[0] == "--gpus" for each in sys.argv[1:])
    if named:
        return exit_code_of(plan_named, of_swarm=EXIT_USER)
    return main(prog="python -m node.plan", add_more=partial(_add_named, in_help_alone=True))


def plan_named() -> int:
    """Plan the GPUs that the arguments name; returns the exit code.

    Raises UserError, NetworkError, and NoPlacementError for a model that they cannot hold.
    """
    arguments = parse()
    named = parse_gpus(arguments.gpus)
    with saying(f"reading the sizes of {arguments.model}"):
        spec, work = studied(arguments.model, arguments.quantize)

    def problem_of(gpus: tuple[str, ...]) -> Problem:
        return named_problem(gpus, spec, work, mbit=arguments.mbit, ms=arguments.ms)

    problem = problem_of(named)
    if shortage := why_uncoverable(problem):
        raise NoPlacementError(f"{shortage}: {_who_is_missing(named, problem_of)}")
    code = plan_and_print(problem, announced_service(problem), arguments)
    if not arguments.json:
        print_lines(NOTE)
    return code


if __name__ == "__main__":
    sys.exit(run())
