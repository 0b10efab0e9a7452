"""The placement that lives beside simple ones, by the living rules.

Every peer of a cluster (Helix's, and those of :mod:`bench.planner.clusters`) measures and announces
by the node's own code on a stand-in device. A coordinator plans from that within its own time, in
seconds of the processor: first, and again when nothing has changed for a while, which is adopted
where its own trial shows a gain that is worth the moves. Rivals plan from the same: a chain of
stage patterns of the most flow with at most so many stages, Petals' greedy rule, SWARM's equal
stages, whole replicas, and Helix's published placement where there is one. All are replayed on the
cluster as it is, by the living rules; ours, the best rival and Helix's by Helix's rules too. On
Helix's clusters the same planner also plans from the tables that the cluster is made of, in
:data:`INFORMED_S`.

Rows are added to the output; those that it has already are kept. With ``--again``, ours is planned
again for them, beside the rivals' figures that are there. With ``--program``, those of few peers
get one more rival: Helix's program by CP-SAT, in :data:`PROGRAM_S`.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from bench import report
from bench.papers.clusters import azure, published
from bench.papers.full_load import offline
from bench.planner.announced import announced_problem
from bench.planner.clusters import HELD_OUT, TUNING, load
from bench.planner.helix.helix_cpsat import solve_by_cpsat
from bench.planner.pattern_cpsat import widest_chain
from bench.planner.stage_patterns import Terrain, place_chains
from coordinator.commands.planner_view import service_of
from coordinator.evaluation.estimate import estimate
from coordinator.evaluation.max_flow import solve_flow
from coordinator.evaluation.plan_check import uncovered
from coordinator.planning.heuristics import heuristics
from coordinator.planning.placement import best_placement
from coordinator.planning.solve import SolveAnswer, SolveRequest, by_clock, solve_request
from coordinator.plans.transition import TransitionConfig
from coordinator.problem.service import announced_service
from coordinator.runtime import CoordinatorConfig
from coordinator.simulator.core.profiles import Profiles
from coordinator.simulator.judge import judge, standing_load
from coordinator.simulator.plans import plan_of
from dht.messages.types import Assignment, FlowEdge, Plan, PlanVersion, Problem
from testing.paths import ROOT

RESULT = ROOT / "bench" / "results" / "live_plan.json"
NAMED = (
    "small10/30b",
    "single24/70b",
    "geo24/70b",
    "het42/70b",
    "single24/30b",
    "geo24/30b",
    "het42/30b",
)
DEPTHS = (8, 11, 14, 20)
SIMPLE_WORK = 2.0
"""Work of one program of the simple rival, in CP-SAT's deterministic seconds: it may take all the
time that it needs."""
REPLAY_S = 240.0
"""Length of a replay by the living rules; it begins in the middle, and its second half counts."""
TOKENS_MIN, REPLAYS_MAX = 60_000, 8
"""Replays by the living rules, each of other requests, end once so many tokens were decoded: what a
small swarm serves in one replay differs by 8% from the next."""
INFORMED_S = 30.0
PROGRAM = "helix's program"
PROGRAM_PEERS_MAX, PROGRAM_S = 8, 600.0
HELIX_S = 240.0
"""Measured time of a replay by Helix's rules, after a minute."""


@dataclass(frozen=True, slots=True)
class Case:
    """A cluster as it is, and as its peers announce it."""

    name: str
    problem: Problem
    profiles: Profiles
    known: Problem

    def replayed(self, plan: Plan, *, helix: bool = False) -> float:
        """Decoded tokens/s of a plan under full load."""
        if helix:
            report = offline(self.problem, self.profiles, plan, azure(), measured_s=HELIX_S)
            return report.decode_tokens_per_s
        served: list[float] = []
        while len(served) < REPLAYS_MAX and sum(served) * REPLAY_S / 2 < TOKENS_MIN:
            seed = 1 + len(served)
            load = standing_load(
                self.problem, self.profiles, plan, azure(), seed=seed, virtual_s=REPLAY_S
            )
            served.append(load)
        return statistics.fmean(served)


def case(name: str) -> Case:
    """A cluster by its name."""
    problem, profiles = load(name)
    return Case(name, problem, profiles, announced_problem(problem, profiles))


@dataclass(frozen=True, slots=True)
class Live:
    """What a coordinator publishes: first, and when nothing has changed for a while."""

    first: Plan
    thorough: Plan
    gain: float
    """What the thorough plan serves more in the coordinator's own trial."""
    took_s: tuple[float, float]

    @property
    def adopted(self) -> Plan:
        """The thorough plan where it is worth its moves."""
        return self.thorough if self.gain >= TransitionConfig().tried_gain_min else self.first


def live(known: Problem, config: CoordinatorConfig) -> Live:
    """A coordinator's plans, within its time limits in seconds of the processor."""
    first, first_s = solved(known, config.solve_s)
    assert first.best is not None, first.error
    placed = {a.peer_id: a for a in first.best.assignments}
    nodes = tuple(replace(node, current=placed.get(node.peer_id)) for node in known.nodes)
    standing = replace(known, nodes=nodes)
    again, again_s = solved(standing, config.thorough_solve_s, thorough=True, flow=first.best.edges)
    assert again.best is not None, again.error
    return Live(first.best, again.best, again.gain or 1.0, (first_s, again_s))


def solved(
    known: Problem,
    limit_s: float,
    *,
    thorough: bool = False,
    flow: tuple[FlowEdge, ...] = (),
    answer_weight: float = 0.0,
) -> tuple[SolveAnswer, float]:
    """A solve's answer, by default for a full swarm, and the seconds of the processor that it
    took."""
    request = SolveRequest(
        problem=known,
        version=PlanVersion(term=1, counter=1 + thorough),
        coordinator="bench",
        time_limit_s=limit_s,
        seed=int(thorough),
        now_unix_s=0.0,
        thorough=thorough,
        flow=flow,
        answer_weight=answer_weight,
    )
    spent = by_clock(limit_s, time.process_time)
    answer = solve_request(request, spent)
    return answer, spent() * limit_s


def simple(known: Problem, stages_max: int) -> tuple[Assignment, ...] | None:
    """The chain of stage patterns of the most flow, by type and region, with a bound on depth."""
    terrain = Terrain(known)
    if not terrain.kinds:
        return None
    chain = widest_chain(terrain, terrain.counts(), stages_max, seed=0, work_max=SIMPLE_WORK)
    return None if chain is None else place_chains(terrain, [chain])


def rivals(each: Case) -> Iterator[tuple[str, Plan]]:
    """The plans that ours is compared with, each once."""
    known = each.known
    made: dict[str, Callable[[], Sequence[Assignment] | None]] = {
        f"patterns, {depth} stages": lambda depth=depth: simple(known, depth)  # type: ignore[misc]
        for depth in DEPTHS
    }
    made["greedy"] = lambda: heuristics.greedy(known)
    made["equal stages"] = lambda: heuristics.equal_stages(known)
    made["replicas"] = lambda: heuristics.replicas(known)
    seen: set[frozenset[Assignment]] = set()
    for name, place in made.items():
        spans = place()
        if spans is None or frozenset(spans) in seen or uncovered(spans, known.model.layers):
            continue
        seen.add(frozenset(spans))
        yield name, plan_of(known, spans, solve_flow(known, spans).edges)
    if "/" in each.name:
        try:
            yield "helix", published(f"{each.name}/helix")[2]
        except KeyError:
            return


def figures(each: Case, plan: Plan) -> dict[str, float]:
    """What a plan serves by the living rules, and what a planner takes it for."""
    service = announced_service(each.known)
    spans, edges = plan.assignments, plan.edges
    return {
        "served": each.replayed(plan),
        "judged": judge(each.known, service, spans, edges),
        "estimated": estimate(each.known, spans, edges, service).tokens_per_s,
    }


def informed(each: Case) -> float:
    """Tokens/s by the living rules of what the planner finds from the cluster's own tables."""
    problem, profiles = each.problem, each.profiles
    placed = best_placement(
        problem,
        time_limit_s=INFORMED_S,
        seed=0,
        spent=by_clock(INFORMED_S, time.process_time),
        service=service_of(problem, profiles, hub=False),
        trials=True,
    )
    return each.replayed(plan_of(problem, placed.assignments, placed.edges))


@dataclass(frozen=True, slots=True)
class Rivals:
    """What a row says of the rivals."""

    figures: dict[str, dict[str, float]]
    by_helix: dict[str, float]
    """What some of them serve by Helix's rules."""

    @property
    def best(self) -> str:
        """The one that serves the most from what peers announce."""
        from_records = (rival for rival in self.figures if rival != "helix")
        return max(from_records, key=lambda rival: self.figures[rival]["served"])

    def joined(self, each: Case, plans: Mapping[str, Plan]) -> "Rivals":
        """These with more of them."""
        found = self.figures | {rival: figures(each, plan) for rival, plan in plans.items()}
        best = Rivals(found, {}).best
        by_helix = {
            rival: each.replayed(plan, helix=True)
            for rival, plan in plans.items()
            if rival in {best, "helix"}
        }
        return Rivals(found, self.by_helix | by_helix)


def row(name: str, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """One cluster; the rivals' figures are those of the row ``before``, if there is one."""
    each = case(name)
    plans = live(each.known, CoordinatorConfig())
    first, thorough = plans.first, plans.thorough
    found = {"first": figures(each, first)}
    is_same = (first.assignments, first.edges) == (thorough.assignments, thorough.edges)
    found["thorough"] = found["first"] if is_same else figures(each, thorough)
    plan = plans.adopted
    known = rivals_in(before) if before else Rivals({}, {}).joined(each, dict(rivals(each)))
    ours_ = {
        "cluster": name,
        "commit": report.commit(),
        "peers": len(each.problem.nodes),
        "model": each.problem.model.name,
        "planner": plan.planner,
        "plan_s": [round(took_s, 2) for took_s in plans.took_s],
        "ours": found["first" if plan is plans.first else "thorough"],
        **found,
        "gain": round(plans.gain, 3),
    }
    by_helix = {"ours": each.replayed(plan, helix=True)}
    return beside(ours_, Rivals(known.figures, known.by_helix | by_helix))


def rivals_in(row: dict[str, Any]) -> Rivals:
    """The rivals of a row."""
    return Rivals(row["rivals"], row["by_helix"])


def beside(ours: dict[str, Any], rivals: Rivals) -> dict[str, Any]:
    """A row: what it says of ours, beside the rivals."""
    all_ = (ours["first"], ours["thorough"], *rivals.figures.values())
    return ours | {
        "rivals": rivals.figures,
        "best": rivals.best,
        "ratio": ours["ours"]["served"] / max(1e-9, rivals.figures[rivals.best]["served"]),
        "by_helix": rivals.by_helix,
        "tau": {
            by: tau([(one[by], one["served"]) for one in all_]) for by in ("judged", "estimated")
        },
    }


def with_program(before: dict[str, Any]) -> dict[str, Any]:
    """A row with Helix's program among the rivals."""
    each = case(before["cluster"])
    hint = heuristics.chain(each.known) or ()
    spans = solve_by_cpsat(each.known, time_limit_s=PROGRAM_S, seed=0, hint=hint)
    if spans is None:
        return before
    plan = plan_of(each.known, spans, solve_flow(each.known, spans).edges)
    return beside(before, rivals_in(before).joined(each, {PROGRAM: plan}))


def tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Kendall's tau of two figures for each placement; None: no two differ."""
    alike = count = 0
    for (a, b), (c, d) in combinations(pairs, 2):
        if a != c and b != d:
            count += 1
            alike += (a < c) == (b < d)
    return round(2 * alike / count - 1, 3) if count else None


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of ours to the best rival, by sort of cluster."""
    sorts = {"named": NAMED, "tuning": TUNING, "held out": HELD_OUT}
    found = {}
    for sort, names in sorts.items():
        ratios = [r["ratio"] for r in rows if r["cluster"] in names]
        if ratios:
            found[sort] = {
                "rows": len(ratios),
                "median": statistics.median(ratios),
                "least": min(ratios),
                "below 0.98": sum(ratio < 0.98 for ratio in ratios),
                "tau": {
                    by: _mean([r["tau"][by] for r in rows if r["cluster"] in names])
                    for by in ("judged", "estimated")
                },
            }
    return found


def _mean(taus: Sequence[float | None]) -> float | None:
    known = [each for each in taus if each is not None]
    return round(statistics.fmean(known), 3) if known else None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = report.parser_of("bench.planner.live_plan", __doc__, out=RESULT)
    parser.add_argument("--only", nargs="*", metavar="CLUSTER", help="these clusters, by name")
    parser.add_argument("--rows", type=int, metavar="N", help="at most so many new rows")
    parser.add_argument("--again", action="store_true", help="ours, also for rows that are there")
    parser.add_argument(
        "--program", action="store_true", help="Helix's program beside those of few"
    )
    arguments = parser.parse_args(argv)
    rows = {each["cluster"]: each for each in report.earlier(arguments.out).get("rows", ())}
    wanted = arguments.only or (*NAMED, *TUNING, *HELD_OUT)
    left = [name for name in wanted if arguments.again or name not in rows]
    left += [n for n in wanted if n in NAMED and n not in left and "informed" not in rows[n]]
    if arguments.program:
        few = (n for n in wanted if n in rows and rows[n]["peers"] <= PROGRAM_PEERS_MAX)
        left = [name for name in few if PROGRAM not in rows[name]["rivals"]]
    for name in left[: arguments.rows]:
        if arguments.program:
            rows[name] = with_program(rows[name])
        elif arguments.again or name not in rows:
            rows[name] = row(name, rows.get(name))
        if name in NAMED and not arguments.program:
            rows[name]["informed"] = informed(case(name))
        print(name, {k: v for k, v in rows[name].items() if k != "cluster"}, flush=True)
        ordered = [rows[n] for n in (*NAMED, *TUNING, *HELD_OUT) if n in rows]
        result = {
            **report.provenance(0),
            "limit_s": [CoordinatorConfig().solve_s, CoordinatorConfig().thorough_solve_s],
            "replay_s": REPLAY_S,
            "rows": ordered,
            "summary": summary(ordered),
        }
        report.write(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
