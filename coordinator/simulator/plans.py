"""A placement as the plan that routes are drawn over."""

from collections.abc import Sequence

from coordinator.evaluation.max_flow import solve_flow
from dht.messages.types import SOURCE, Assignment, FlowEdge, Plan, PlanVersion, Problem


def plan_of(
    problem: Problem,
    assignments: Sequence[Assignment],
    edges: Sequence[FlowEdge] | None = None,
    *,
    coordinator: str = "simulated",
) -> Plan:
    """The plan of ``assignments``; without ``edges``, it gets their max flow."""
    flow = sum(e.tokens_per_s for e in edges or () if e.tail == SOURCE)
    if edges is None:
        solution = solve_flow(problem, tuple(assignments))
        edges, flow = solution.edges, solution.flow_tokens_per_s
    return Plan(
        version=PlanVersion(term=1, counter=1),
        coordinator=coordinator,
        model=problem.model,
        assignments=tuple(assignments),
        edges=tuple(edges),
        flow_tokens_per_s=flow,
        bound_tokens_per_s=flow,
        planner=coordinator,
        solve_s=0.0,
        created_unix_s=0.0,
    )
