"""``python -m coordinator.plan CLUSTER.json [--model NAME]``: plan a cluster offline.

With ``--initial-peers ADDR…`` instead of a file it plans the living swarm, as its peers announce it
now; nothing is published. It prints which node gets which layers and what the plan would serve;
``--json`` prints one object. ``docs/cluster-format.md`` describes the formats of cluster files.

Exit codes: 0 done; 2 the caller's mistake, or a cluster that cannot hold the model; 3 the swarm
cannot be reached; 130 interrupted.
"""

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.commands.planner_view import read_service
from coordinator.commands.swarm_file import read_file
from coordinator.evaluation.explain.weak_points import weak_points
from coordinator.evaluation.explain.words import sentences
from coordinator.evaluation.plan_check import check_plan
from coordinator.planning.advice import one_more
from coordinator.planning.placement import Placement, best_placement, make_plan
from coordinator.planning.search.generation import Searched
from coordinator.planning.solve import by_clock
from coordinator.plans.demand import DemandConfig, planned_for, weight_at
from coordinator.plans.transition import fetch_bytes
from coordinator.problem.cluster_file import read_cluster
from coordinator.problem.service import Service
from dht.command_line import EXIT_DONE, EXIT_USER, Parser, exit_code_of, number_in
from dht.identity.peer_id import short_name
from dht.messages.types import Assignment, Plan, PlanVersion, Problem, span_text
from dht.networks.invitation import is_invitation
from dht.process.terminal import console_of_rich, saying
from dht.swarm_options import settle_swarm

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLE = """example, the two nodes in docs/cluster-format.md as two.json:
  %(prog)s two.json
  > capacity, all users together: about 1732.4 tokens/s
With --json, estimate_tokens_per_s is what the plan would serve under full
load, by coordinator.evaluation.estimate.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceConfig:
    """How much of a plan is shown, and what advice on one more peer may take."""

    bar: int = 10
    most: int = 3
    time_share: float = 0.5
    """Time for the advice on one more peer, as a share of the time limit; without ``--json``
    only."""


ADVICE = AdviceConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerResult:
    """A checked plan, and the problem, service and placement it was made from."""

    problem: Problem
    service: Service
    placement: Placement
    plan: Plan


def plan_offline(
    problem: Problem, service: Service, *, time_limit_s: float, seed: int
) -> PlannerResult:
    """The best plan found in time, checked: by the planner that swarms run while nothing changes,
    with its trials. Raises NoPlacementError when there is none."""
    started_s = time.monotonic()
    placement = best_placement(
        problem,
        time_limit_s=time_limit_s,
        seed=seed,
        spent=by_clock(time_limit_s),
        service=service,
        trials=True,
    )
    plan = make_plan(
        problem,
        placement,
        version=PlanVersion(term=1, counter=1),
        coordinator="offline",
        solve_s=time.monotonic() - started_s,
        now_unix_s=0.0,
    )
    wrong = check_plan(plan, problem)
    if wrong:
        raise RuntimeError(f"the planner's plan is wrong: {'; '.join(wrong)}")
    return PlannerResult(problem=problem, service=service, placement=placement, plan=plan)


def fetched_bytes(answer: PlannerResult) -> int:
    """Bytes of weights that peers would have to read for this plan, beyond what they hold now."""
    held = [
        replace(node.current, peer_id=node.peer_id)
        for node in answer.problem.nodes
        if node.current is not None
    ]
    return sum(fetch_bytes(answer.problem.model, held, answer.plan.assignments).values())


def plans_json(answer: PlannerResult) -> dict[str, object]:
    """The command's JSON contract."""
    plan, done = answer.plan, answer.placement.searched or Searched()
    return {
        "planner": plan.planner,
        "placement": {a.peer_id: [a.start, a.end] for a in _in_order(plan)},
        "edges": [[e.tail, e.head, e.tokens_per_s] for e in plan.edges],
        "flow_tokens_per_s": plan.flow_tokens_per_s,
        "bound_tokens_per_s": plan.bound_tokens_per_s,
        "estimate_tokens_per_s": plan.estimate_tokens_per_s or 0.0,
        "one_answer_tokens_per_s": _alone(answer),
        "answer_weight": plan.answer_weight,
        "fetch_bytes": fetched_bytes(answer),
        "search": {
            "columns": done.columns,
            "judged": done.judged,
            "master_solves": done.masters,
            "bound_tokens_per_s": done.bound_tokens_per_s,
            "failed": done.failed,
        },
        "seconds": plan.solve_s,
    }


def _alone(answer: PlannerResult) -> float:
    """Tokens/s of one answer that has the peers to itself; 0 where that is not known."""
    token_s = answer.placement.one_answer_s
    return 1 / token_s if math.isfinite(token_s) and token_s > 0 else 0.0


def _in_order(plan: Plan) -> list[Assignment]:
    return sorted(plan.assignments, key=lambda a: (a.start, a.end, a.peer_id))


def print_plan(answer: PlannerResult, *, advise_s: float, seed: int) -> None:
    """Print the plan for people; the advice on one more peer takes ``advise_s`` seconds."""
    console, plan = console_of_rich(highlight=False), answer.plan
    console.print(_stages(answer))
    console.print(
        f"capacity, all users together: about {plan.estimate_tokens_per_s or 0.0:.1f} tokens/s"
        " (estimated from batches, queues, links and memory)"
    )
    if alone := _alone(answer):
        console.print(f"one answer that is alone: about {alone:.1f} tokens/s")
    console.print(f"planned {planned_for(plan.answer_weight)}")
    for line in _searched(answer):
        console.print(line)
    console.print(f"weights to fetch: {fetched_bytes(answer) / 2**30:.3g} GiB")
    for sentence in sentences(weak_points(answer.problem, plan.assignments), short_name):
        console.print(sentence)
    if advise_s <= 0:
        return
    with saying(f"looking for {advise_s:.0f} s at what one more peer would bring"):
        gains = one_more(
            answer.problem,
            answer.placement,
            answer.service,
            seed=seed,
            spent=by_clock(advise_s),
        )
    for name, gain in gains[: ADVICE.most]:
        console.print(f"Planned anew, one more peer like {short_name(name)} would give {gain:+.0%}")


def _searched(answer: PlannerResult) -> Iterator[str]:
    """Whether the search went through, and how far it is from the best at most, in words."""
    done, served = answer.placement.searched, answer.plan.estimate_tokens_per_s
    if done is None:
        return
    if done.failed:
        yield f"the search failed ({done.failed}); simpler rules placed the layers"
    if done.bound_tokens_per_s and served:
        yield (
            f"by the same estimate no plan serves more than {done.bound_tokens_per_s:.1f} tokens/s,"
            f" {done.bound_tokens_per_s / served:.2f} times as much"
        )


def _stages(answer: PlannerResult) -> "Table":
    """The table of stages: layers, a bar and numbers of what they carry, and peers."""
    from rich.table import Table

    plan, model = answer.plan, answer.problem.model
    rates = {node.peer_id: node.tokens_per_s for node in answer.problem.nodes}
    carried: dict[str, float] = {}
    for edge in plan.edges:
        carried[edge.head] = carried.get(edge.head, 0.0) + edge.tokens_per_s
    stages: dict[tuple[int, int], list[str]] = {}
    for a in _in_order(plan):
        stages.setdefault((a.start, a.end), []).append(a.peer_id)
    count = f"{len(stages)} stage{'s' * (len(stages) > 1)}"
    table = Table(title=f"{model.name}, {model.layers} layers, {count}")
    table.add_column("layers", justify="right")
    table.add_column("")
    for heading in ("carries", "can carry"):
        table.add_column(f"{heading},\ntokens/s", justify="right")
    table.add_column("peers", overflow="fold")
    for (start, end), peers in stages.items():
        flow = sum(carried.get(peer, 0.0) for peer in peers)
        room = sum(rates[peer][end - start - 1] for peer in peers)
        full = round(ADVICE.bar * min(1.0, flow / room)) if room > 0 else 0
        bar = "█" * full + "░" * (ADVICE.bar - full)
        table.add_row(
            span_text(start, end),
            bar,
            f"{flow:.1f}",
            f"{room:.1f}",
            ", ".join(map(short_name, peers)),
        )
    return table


def parse(
    argv: list[str] | None = None,
    *,
    prog: str = "python -m coordinator.plan",
    add_more: Callable[[Parser], None] = lambda _: None,
) -> argparse.Namespace:
    """The command's arguments; raises UserError. ``add_more`` adds options to ``prog``'s parser."""
    parser = Parser(
        prog=prog,
        description="Plan a cluster: which node gets which layers, and what that serves.",
        usage="%(prog)s CLUSTER.json [options]\n"
        "       %(prog)s anabranch:… [--model NAME] [options]",
        epilog=EXAMPLE,
        exit_codes="0 done, 2 your mistake, 3 no swarm, 130 interrupted",
        raw=True,
    )
    parser.add_argument(
        "cluster",
        type=Path,
        nargs="?",
        metavar="CLUSTER.json",
        help="a cluster (docs/cluster-format.md) or an invitation; else the network that is"
        " remembered",
    )
    parser.add_argument(
        "--initial-peers",
        nargs="+",
        default=[],
        metavar="ADDR",
        help="plan the living swarm behind these addresses instead; nothing is published",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="which of the file's models, if there are several; of a swarm its name or directory",
    )
    parser.add_argument("--network", metavar="NAME", help="of --initial-peers (anabranch)")
    add_search_options(parser)
    add_more(parser)
    arguments = parser.parse_args(argv)
    arguments.invitation = None
    if is_invitation(str(arguments.cluster)):
        arguments.invitation, arguments.cluster = str(arguments.cluster), None
    if arguments.cluster is None:
        settle_swarm(arguments)
    elif arguments.initial_peers:
        parser.error("give either a CLUSTER.json or --initial-peers")
    return arguments


def add_search_options(parser: Parser) -> None:
    parser.add_argument(
        "--time-limit",
        type=number_in(0, 86400, "seconds between 0 and 86400", above=True),
        default=10.0,
        metavar="S",
        help="seconds for the search (default 10)",
    )
    parser.add_argument(
        "--load",
        type=number_in(0, 1, "a share from 0 to 1"),
        default=1.0,
        metavar="SHARE",
        help="demand as a share of what the peers can serve: up to"
        f" {DemandConfig().full_share} the speed of one answer counts, too, most at 0 (an idle"
        " swarm); beyond, only all users' tokens/s (default: 1, a full swarm)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="same seed, same search (0)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, with whole peer ids")


def _problem(arguments: argparse.Namespace) -> tuple[Problem, Service]:
    """The problem of the cluster file or the living swarm. Raises UserError, NetworkError."""
    if arguments.cluster is not None:
        problem = read_cluster(read_file(arguments.cluster), arguments.model)
        return problem, read_service(arguments.cluster, problem)
    from coordinator.plans.announced_problem import read_announced_problem
    from coordinator.problem.model_pin import ModelPin, named_peers
    from dht.checkpoints.gguf_model import model_directory
    from dht.checkpoints.hub import served_name
    from dht.checkpoints.model_files import directory_root

    directory = model_directory(arguments.model)
    pin = ModelPin(
        root=directory_root(directory) if directory is not None else "",
        fingerprint=getattr(arguments, "fingerprint", ""),
        named=named_peers(arguments.initial_peers),
    )
    name = served_name(arguments.model)
    return asyncio.run(
        read_announced_problem(tuple(arguments.initial_peers), name, arguments.network, pin)
    )


def plan_and_print(problem: Problem, service: Service, arguments: argparse.Namespace) -> int:
    """Plan, print and return the exit code. Raises NoPlacementError when there is no plan.

    ``arguments`` are those of :func:`add_search_options`.
    """
    load = replace(service.workload, answer_weight=weight_at(arguments.load))
    with saying(f"searching for the best plan, {arguments.time_limit:g} s at most"):
        found = plan_offline(
            problem,
            replace(service, workload=load),
            time_limit_s=arguments.time_limit,
            seed=arguments.seed,
        )
    if arguments.json:
        print(json.dumps(plans_json(found)))
    else:
        print_plan(found, advise_s=ADVICE.time_share * arguments.time_limit, seed=arguments.seed)
    return EXIT_DONE


def main(argv: list[str] | None = None, **of_parser: Any) -> int:
    """Run the command, with further arguments of :func:`parse`; returns its exit code."""

    def work() -> int:
        arguments = parse(argv, **of_parser)
        return plan_and_print(*_problem(arguments), arguments)

    return exit_code_of(work, of_swarm=EXIT_USER)


if __name__ == "__main__":
    sys.exit(main())
