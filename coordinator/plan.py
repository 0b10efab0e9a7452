"""``python -m coordinator.plan CLUSTER.json [--model NAME]``: plan a cluster offline.

Prints which node gets which layers and what that serves; ``--json`` prints one object. The
formats of cluster files are described in :mod:`coordinator.cluster`.

Exit codes: 0 done; 2 the caller's mistake, a cluster that cannot hold the model among them; 130
interrupted.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

from coordinator.check import check_plan
from coordinator.cluster import read_cluster
from coordinator.placement import NoPlacementError, best_placement, make_plan
from coordinator.service import Service
from coordinator.service_file import read_service
from dht.command_line import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER, Parser
from dht.errors import UserError
from dht.types import Assignment, Plan, PlanEpoch, Problem

FILE_BYTES_MAX = 64 << 20


def plan_offline(
    problem: Problem, *, time_limit_s: float, seed: int, service: Service | None = None
) -> Plan:
    """The best plan that was found in time, checked. Raises NoPlacementError when there is none."""
    started_s = time.monotonic()
    placement = best_placement(
        problem,
        time_limit_s=time_limit_s,
        seed=seed,
        spent=lambda: (time.monotonic() - started_s) / time_limit_s,
        service=service,
    )
    plan = make_plan(
        problem,
        placement,
        epoch=PlanEpoch(term=1, counter=1),
        coordinator="offline",
        solve_s=time.monotonic() - started_s,
        now_unix_s=0.0,
    )
    wrong = check_plan(plan, problem)
    if wrong:
        raise RuntimeError(f"the planner's plan is wrong: {'; '.join(wrong)}")
    return plan


def as_json(plan: Plan) -> dict[str, object]:
    """The command's JSON contract."""
    return {
        "planner": plan.planner,
        "placement": {a.peer_id: [a.start, a.end] for a in _in_order(plan)},
        "edges": [[e.tail, e.head, e.tokens_per_s] for e in plan.edges],
        "flow_tokens_per_s": plan.flow_tokens_per_s,
        "bound_tokens_per_s": plan.bound_tokens_per_s,
        "estimate_tokens_per_s": plan.estimate_tokens_per_s,
        "seconds": plan.solve_s,
    }


def _in_order(plan: Plan) -> list[Assignment]:
    return sorted(plan.assignments, key=lambda a: (a.start, a.end, a.peer_id))


def print_table(plan: Plan, problem: Problem) -> None:
    """The plan for people."""
    from rich.console import Console
    from rich.table import Table

    rates = {node.peer_id: node.tokens_per_s for node in problem.nodes}
    carried: dict[str, float] = {}
    for edge in plan.edges:
        carried[edge.head] = carried.get(edge.head, 0.0) + edge.tokens_per_s
    table = Table(title=f"{plan.model.name}, {plan.model.layers} layers")
    table.add_column("node")
    for heading in ("layers", "count", "tokens/s it can", "tokens/s it carries"):
        table.add_column(heading, justify="right")
    for a in _in_order(plan):
        count = a.end - a.start
        table.add_row(
            a.peer_id,
            f"{a.start}-{a.end - 1}",
            str(count),
            f"{rates[a.peer_id][count - 1]:.1f}",
            f"{carried.get(a.peer_id, 0.0):.1f}",
        )
    console = Console()
    console.print(table)
    share = plan.flow_tokens_per_s / plan.bound_tokens_per_s if plan.bound_tokens_per_s else 0.0
    console.print(
        f"max flow {plan.flow_tokens_per_s:.1f} tokens/s, {share:.0%} of the upper bound"
        f" {plan.bound_tokens_per_s:.1f}; by {plan.planner} in {plan.solve_s:.2f} s",
        highlight=False,
    )
    console.print(
        f"about {plan.estimate_tokens_per_s:.1f} decoded tokens/s under full load"
        " (estimated from batches, queues, links and KV room)",
        highlight=False,
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and 0 < value <= 86400):
        raise argparse.ArgumentTypeError("give seconds between 0 and 86400")
    return value


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise UserError(f"{path} is larger than {FILE_BYTES_MAX >> 20} MiB")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command's arguments; raises UserError."""
    parser = Parser(
        prog="python -m coordinator.plan",
        description="Plan a cluster offline: which node gets which layers, and what that serves.",
        epilog="estimate_tokens_per_s is what the plan would serve under full load, by"
        " coordinator.estimate. Exit codes: 0 done, 2 your mistake (a cluster too small"
        " for the model, too), 130 interrupted.",
    )
    parser.add_argument("cluster", type=Path, metavar="CLUSTER.json")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="a model that the cluster file describes; may be left out when it is the only one",
    )
    parser.add_argument(
        "--time-limit",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="seconds for the search (default 10)",
    )
    parser.add_argument("--seed", type=int, default=0, help="same seed, same search")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser.parse_args(argv)


def _say(error: Exception, code: int) -> int:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    try:
        arguments = parse(argv)
        problem = read_cluster(_read(arguments.cluster), arguments.model)
        plan = plan_offline(
            problem,
            time_limit_s=arguments.time_limit,
            seed=arguments.seed,
            service=read_service(arguments.cluster, problem),
        )
    except (UserError, NoPlacementError) as error:
        return _say(error, EXIT_USER)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    if arguments.json:
        print(json.dumps(as_json(plan)))
    else:
        print_table(plan, problem)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
