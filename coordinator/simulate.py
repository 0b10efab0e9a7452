"""``python -m coordinator.simulate CLUSTER.json``: simulate what a swarm would serve.

Cluster files are described in :mod:`coordinator.problem.cluster_file`, their profiles in
:mod:`coordinator.commands.swarm_file`. A placement file is the output of ``python -m
coordinator.plan --json``, or any object with ``placement: {node: [start, end]}``; with ``edges``,
routes follow them.

Exit codes: 0 done; 2 the caller's mistake, or a cluster that cannot hold the model; 130
interrupted.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from coordinator.commands.full_load import (
    SCHEDULERS,
    WIRES,
    OfflineConfig,
    OnlineConfig,
    Rules,
    offline,
    online,
)
from coordinator.commands.planner_view import service_of
from coordinator.commands.swarm_file import read_file, read_swarm
from coordinator.evaluation.plan_check import check_shape, uncovered
from coordinator.planning.placement import HEURISTICS, Placement, best_placement
from coordinator.planning.solve import by_clock
from coordinator.simulator.core.profiles import Profiles
from coordinator.simulator.core.report import SimulationReport
from coordinator.simulator.core.swarm import AS_CHOSEN
from coordinator.simulator.core.trace import Request, as_in_papers, read_trace, resampled, typical
from coordinator.simulator.plans import plan_of
from dht.command_line import EXIT_DONE, EXIT_USER, Parser, exit_code_of, number_in
from dht.errors import SwarmError, UserError
from dht.messages.types import (
    PLAN_EDGES_MAX,
    RECORD_BOUNDS,
    Assignment,
    FlowEdge,
    Plan,
    Problem,
    Rate,
)
from dht.process.terminal import console_of_rich

EXAMPLE = """example, 500 tokens/s for the two nodes in docs/cluster-format.md as two.json:
  %(prog)s two.json --mode online --rate 500 --duration 90
  > 105.8 tokens/s decoded, 365.4 prompt tokens/s, 2.0 sessions open on average
example, Helix's 24 peers with our planner's placement, then with your own plan:
  %(prog)s single24.json --model 70b --trace azure.csv
  anabranch plan single24.json --model 70b --json > plan.json
  %(prog)s single24.json --model 70b --placement plan.json
"""
NOTHING = "–"
Layer = Annotated[int, Meta(ge=0, le=RECORD_BOUNDS.layers_max)]


class _PlacementFile(msgspec.Struct):
    placement: dict[str, tuple[Layer, Layer]]
    edges: Annotated[list[tuple[str, str, Rate]], Meta(max_length=PLAN_EDGES_MAX)] = []


def options(prog: str, schedulers: Sequence[str] = SCHEDULERS, example: str = EXAMPLE) -> Parser:
    """The options of a command that simulates a swarm; the first scheduler is the default."""
    parser = Parser(
        prog=prog,
        usage="%(prog)s CLUSTER.json [options]",
        description="Simulate a swarm: tokens/s, latencies, how busy and full peers and links are.",
        epilog=example,
        exit_codes="0 done, 2 your mistake or too small, 130 interrupted",
        raw=True,
    )
    parser.add_argument(
        "cluster",
        type=Path,
        metavar="CLUSTER.json",
        help="as docs/cluster-format.md describes it",
    )
    parser.add_argument("--model", metavar="NAME", help="where the file describes several")
    parser.add_argument(
        "--trace", type=Path, metavar="CSV", help="lengths and arrivals (default: made-up lengths)"
    )
    parser.add_argument(
        "--placement",
        default="plan",
        metavar="P",
        help=f"plan (default), a JSON file, or one of {', '.join(HEURISTICS)}",
    )
    for name, choices, default, what in (
        ("--scheduler", schedulers, schedulers[0], "how requests choose peers"),
        ("--link-policy", WIRES, "framed", "what a link sends next"),
        ("--mode", ("offline", "online"), "offline", "under full load, or at --rate"),
    ):
        others = ", ".join(choice for choice in choices if choice != default)
        parser.add_argument(
            name,
            choices=choices,
            default=default,
            metavar=name[2].upper(),
            help=f"{what}: {default} (default), {others}",
        )
    positive = number_in(0, 1e9, "a number above 0", above=True)
    parser.add_argument(
        "--rate", type=positive, metavar="TOKENS/S", help="online: tokens that arrive, prompts too"
    )
    parser.add_argument(
        "--warm-up",
        type=number_in(0, 1e9, "seconds from 0 on"),
        default=60.0,
        metavar="S",
        help="seconds not counted (60)",
    )
    parser.add_argument(
        "--duration", type=positive, default=600.0, metavar="S", help="seconds counted (600)"
    )
    parser.add_argument(
        "--chunk", type=int, metavar="N", help="tokens; 0: whole; without it as the stages choose"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="same seed, same requests (0)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="pictures (needs matplotlib)")
    return parser


def parse(parser: Parser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of a command with these options; raises UserError."""
    arguments = parser.parse_args(argv)
    if arguments.mode == "online" and arguments.rate is None:
        raise UserError("--mode online needs --rate, the tokens/s that arrive")
    if arguments.mode != "online" and arguments.rate is not None:
        raise UserError("--rate goes with --mode online; without, the swarm is at full load")
    if not 0 <= (arguments.chunk or 0) <= 1 << 20:
        raise UserError("--chunk takes 0 to 1048576 tokens")
    return arguments


def read_placement(path: Path, problem: Problem) -> Plan:
    """A placement file, checked against the problem; without edges, it gets its max flow. Raises
    UserError."""
    try:
        file = msgspec.json.decode(read_file(path), type=_PlacementFile)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UserError(f"{path} is no placement: {error}") from error
    nodes = {node.peer_id for node in problem.nodes}
    for name, (start, end) in file.placement.items():
        if name not in nodes:
            raise UserError(f"{path} places {name}, which is no node of the cluster")
        if not start <= end <= problem.model.layers:
            raise UserError(
                f"{path}: [{start}, {end}) is no range of {problem.model.layers} layers"
            )
    placed = tuple(Assignment(peer_id=n, start=a, end=b) for n, (a, b) in file.placement.items())
    _check_covers(placed, problem)
    edges = [FlowEdge(tail=a, head=b, tokens_per_s=flow) for a, b, flow in file.edges]
    plan = plan_of(problem, placed, edges or None)
    if edges and (wrong := check_shape(plan)):
        raise UserError(f"{path}: {wrong[0]}")
    return plan


def _check_covers(placed: Sequence[Assignment], problem: Problem) -> None:
    gaps = uncovered(placed, problem.model.layers)
    if gaps:
        raise UserError(f"the placement leaves layers without a holder: {gaps}")


def simulated_placement(
    choice: str, problem: Problem, profiles: Profiles, seed: int
) -> Placement | Plan | tuple[Assignment, ...]:
    """The placement that ``--placement`` names; raises UserError or SwarmError."""
    if choice == "plan":
        return best_placement(
            problem,
            time_limit_s=10.0,
            seed=seed,
            spent=by_clock(10.0),
            service=service_of(problem, profiles, hub=False),
            trials=True,
        )
    if choice not in HEURISTICS:
        return read_placement(Path(choice), problem)
    found = HEURISTICS[choice](problem)
    if found is None:
        raise SwarmError(f"{choice} finds no placement here")
    _check_covers(found, problem)
    return found


def read(
    arguments: argparse.Namespace,
) -> tuple[Problem, Profiles, Placement | Plan | tuple[Assignment, ...], Sequence[Request]]:
    """The swarm, its placement, and the requests that the arguments name: the trace to draw from
    for ``--mode offline``, otherwise requests at their arrival times. Raises UserError and
    SwarmError."""
    problem, profiles = read_swarm(arguments.cluster, arguments.model)
    trace: Sequence[Request] = typical()
    if arguments.trace is not None:
        trace = as_in_papers(read_trace(read_file(arguments.trace)))
        if not trace:
            raise UserError("the trace has no request of 4-2048 input and 4-1024 output tokens")
    placement = simulated_placement(arguments.placement, problem, profiles, arguments.seed)
    if arguments.mode == "online":
        trace = resampled(
            trace,
            tokens_per_s=arguments.rate,
            duration_s=arguments.warm_up + arguments.duration,
            seed=arguments.seed,
        )
    return problem, profiles, placement, trace


def rules_of(arguments: argparse.Namespace, scheduler: str) -> Rules:
    """The rules that the arguments name, with one of our schedulers."""
    return Rules(
        scheduler=scheduler,
        links=arguments.link_policy,
        chunk_tokens=AS_CHOSEN if arguments.chunk is None else arguments.chunk or None,
    )


def simulate(arguments: argparse.Namespace, progress: Callable[[float], None]) -> SimulationReport:
    problem, profiles, placement, requests = read(arguments)
    rules = rules_of(arguments, arguments.scheduler)
    warm_up_s, measured_s = arguments.warm_up, arguments.duration
    if arguments.mode == "offline":
        config = OfflineConfig(
            seed=arguments.seed, warm_up_s=warm_up_s, measured_s=measured_s, rules=rules
        )
        return offline(problem, profiles, placement, requests, config, progress)
    arrivals = OnlineConfig(warm_up_s=warm_up_s, measured_s=measured_s, rules=rules)
    return online(problem, profiles, placement, requests, arrivals, progress)


def report_json(report: SimulationReport) -> dict[str, object]:
    """The command's JSON contract: the report, links as ``source>target``."""
    plain = asdict(report)
    plain["links"] = {f"{a}>{b}": asdict(use) for (a, b), use in report.links.items()}
    return plain


def short_duration(seconds: float) -> str:
    """A duration in words, for example ``2.1 s``, ``138 ms``, ``0.2 ms``, ``40 µs``."""
    for size_s, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size_s:
            value = seconds / size_s
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{seconds * 1e6:.0f} µs" if seconds > 0 else "0"


def share(value: float) -> str:
    """A share in words, for example ``57%``; a dash for 0, ``<1%`` for very little."""
    return NOTHING if value <= 0 else "<1%" if value < 0.01 else f"{value:.0%}"


def print_tables(report: SimulationReport) -> None:
    from rich.table import Table

    console = console_of_rich()
    console.print(
        f"[bold]{report.decode_tokens_per_s:.1f}[/bold] tokens/s decoded,"
        f" {report.prompt_tokens_per_s:.1f} prompt tokens/s, {report.sessions_live:.1f} sessions"
        f" open on average, {report.sessions_done} done, {report.rejected} rejected",
        highlight=False,
    )
    if not report.prompt.count:
        console.print(f"No prompt ended in the {report.measured_s:g} s measured (--duration).")
    times = Table(title="time to the prompt's end, and from token to token")
    for heading in ("", "mean", *(f"P{percent}" for percent in report.prompt.percentiles_s)):
        times.add_column(heading, justify="right", no_wrap=True)
    for name, what in (("prompt", report.prompt), ("next token", report.decode)):
        values = [what.mean_s, *what.percentiles_s.values()]
        times.add_row(name, *(short_duration(value) if what.count else NOTHING for value in values))
    console.print(times)
    peers = Table(title="peers")
    for heading in ("peer", "layers", "busy", "KV peak", "tokens/step"):
        peers.add_column(heading, justify="right")
    for name, use in sorted(report.peers.items(), key=lambda item: -item[1].busy)[:30]:
        peers.add_row(
            name,
            str(use.layers),
            share(use.busy),
            share(use.kv_peak),
            f"{use.tokens_per_step:.1f}" if use.tokens_per_step else NOTHING,
        )
    console.print(peers)
    if not report.links:
        return
    links = Table(title="mean waits on links")
    for heading in ("link", "pieces", "busy", "waited"):
        links.add_column(heading, justify="right")
    for (a, b), link in sorted(report.links.items(), key=lambda item: -item[1].waited_s)[:8]:
        waited = short_duration(link.waited_s) if link.pieces else NOTHING
        links.add_row(f"{a} → {b}", str(link.pieces), share(link.busy), waited)
    console.print(links)


def command(
    parser: Parser,
    simulate: Callable[[argparse.Namespace, Callable[[float], None]], SimulationReport],
    argv: Sequence[str] | None = None,
) -> int:
    """Simulate what the arguments describe and print the report; returns the exit code."""
    from rich.console import Console
    from rich.progress import Progress

    def work() -> int:
        arguments = parse(parser, argv)
        if arguments.plot is not None:
            from coordinator.commands.plots import draw_plots, prepare_plots

            prepare_plots(arguments.plot)
        console = Console(stderr=True)
        # Where nobody sees a bar, rich would end it with a blank line.
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("simulating", total=1.0)
            report = simulate(arguments, lambda share: bar.update(task, completed=share))
        if arguments.plot is not None:
            draw_plots(report, arguments.plot)
        if arguments.json:
            print(json.dumps(report_json(report)))
        else:
            print_tables(report)
        return EXIT_DONE

    return exit_code_of(work, of_swarm=EXIT_USER)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return command(options("python -m coordinator.simulate"), simulate, argv)


if __name__ == "__main__":
    sys.exit(main())
