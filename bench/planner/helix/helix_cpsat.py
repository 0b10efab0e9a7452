"""Finds the exact placement of a dozen peers: Helix's program (§4.3-4.5) in CP-SAT.

One Boolean per (peer, start, count) that fits; flows are whole numbers; an edge carries flow only
where its ends' layers follow each other.
"""

from collections.abc import Sequence
from typing import Any

from coordinator.evaluation.max_flow import (
    bandwidth_bytes_per_s,
    own_rates_bytes_per_s,
    solve_flow,
    upper_bound,
)
from coordinator.evaluation.shared_uplinks import shared_uplinks
from dht.messages.types import SINK, SOURCE, Assignment, Problem, fits

UNITS_MAX = 10_000_000
"""Maximum total flow in whole units: fine enough to compare, small enough to search."""
WITHIN = 0.98
"""Minimum share of the best flow that is kept for shorter routes and fewer moves."""
WORKERS = 2


def solve_by_cpsat(
    problem: Problem, *, time_limit_s: float, seed: int, hint: Sequence[Assignment]
) -> tuple[Assignment, ...] | None:
    """The placement with the most flow found in time; then the fewest stages, then moved layers.

    None when none was found. The search starts from ``hint``. The result is repeatable where the
    search ends before its time limit.
    """
    program = _Program(problem, seed)
    program.hint(hint)
    if not program.maximise_flow(0.7 * time_limit_s):
        return None
    program.prefer_short(0.3 * time_limit_s)
    return program.best


class _Program:
    def __init__(self, problem: Problem, seed: int) -> None:
        from ortools.sat.python import cp_model

        self._cp = cp_model
        self._problem = problem
        self._seed = seed
        self._model = model = cp_model.CpModel()
        self._layers = layers = problem.model.layers
        self._choices = {
            (node.peer_id, at, count): model.new_bool_var(f"{index}:{at}+{count}")
            for index, node in enumerate(problem.nodes)
            for at in range(layers)
            for count in range(1, min(len(node.tokens_per_s), layers - at) + 1)
            if fits(problem.model, node, at, at + count)
        }
        self._scale = self._units_per_token()
        self._peers = [node.peer_id for node in problem.nodes]
        self._flows: dict[tuple[str, str], tuple[Any, Any]] = {}
        self._define_spans()
        self._define_flow()
        self.best: tuple[Assignment, ...] | None = None

    def _units_per_token(self) -> float:
        total = sum(max(node.tokens_per_s, default=0.0) for node in self._problem.nodes)
        return UNITS_MAX / max(total, 1e-9)

    def _define_spans(self) -> None:
        """Give each peer at most one span, which determines its start, end and T_i(j)."""
        model = self._model
        self._start, self._end, self._rate, self._used = {}, {}, {}, {}
        for node in self._problem.nodes:
            mine = [(key, var) for key, var in self._choices.items() if key[0] == node.peer_id]
            variables = [var for _, var in mine]
            units = [int(rate * self._scale) for rate in node.tokens_per_s]
            used = model.new_bool_var("used")
            start = model.new_int_var(0, self._layers, "start")
            end = model.new_int_var(0, self._layers, "end")
            rate = model.new_int_var(0, max(units, default=0), "rate")
            sums = self._cp.LinearExpr.weighted_sum
            model.add(sum(variables) == used)
            model.add(start == sums(variables, [at for (_, at, _), _ in mine]))
            model.add(end == sums(variables, [at + n for (_, at, n), _ in mine]))
            model.add(rate == sums(variables, [units[n - 1] for (_, _, n), _ in mine]))
            self._used[node.peer_id] = used
            self._start[node.peer_id], self._end[node.peer_id] = start, end
            self._rate[node.peer_id] = rate

    def _define_flow(self) -> None:
        model, problem = self._model, self._problem
        bandwidth = bandwidth_bytes_per_s(problem)
        inflow: dict[str, list[Any]] = {peer: [] for peer in self._peers}
        outflow: dict[str, list[Any]] = {peer: [] for peer in self._peers}
        client = problem.client_bandwidth_bytes_per_s / max(1, problem.token_bytes)
        entering = []
        for peer in self._peers:
            flow, is_open = self._edge(SOURCE, peer, client)
            model.add(self._start[peer] == 0).only_enforce_if(is_open)
            model.add_implication(is_open, self._used[peer])
            inflow[peer].append(flow)
            entering.append(flow)
            flow, is_open = self._edge(peer, SINK, client)
            model.add(self._end[peer] == self._layers).only_enforce_if(is_open)
            outflow[peer].append(flow)
            for other in self._peers:
                if other == peer:
                    continue
                limit = bandwidth(peer, other) / max(1, problem.model.activation_bytes)
                flow, is_open = self._edge(peer, other, limit)
                model.add(self._start[other] <= self._end[peer]).only_enforce_if(is_open)
                model.add(self._end[other] >= self._end[peer] + 1).only_enforce_if(is_open)
                model.add_implication(is_open, self._used[peer])
                outflow[peer].append(flow)
                inflow[other].append(flow)
        for peer in self._peers:
            model.add(sum(inflow[peer]) == sum(outflow[peer]))
            model.add(sum(inflow[peer]) <= self._rate[peer])
        for peer, (up, down) in own_rates_bytes_per_s(problem).items():
            to_peers = [f for (a, b), (f, _) in self._flows.items() if a == peer and b != SINK]
            from_peers = [f for (a, b), (f, _) in self._flows.items() if b == peer and a != SOURCE]
            for flows, limit in ((to_peers, up), (from_peers, down)):
                model.add(sum(flows) <= self._units(limit / max(1, problem.model.activation_bytes)))
        shared = shared_uplinks(problem)
        for way, rate in shared.bytes_per_s.items():
            flows = [f for pair, (f, _) in self._flows.items() if way in shared.crossed(*pair)]
            model.add(sum(flows) <= self._units(rate / max(1, problem.model.activation_bytes)))
        most = int(upper_bound(problem) * self._scale) + 1
        self._total = model.new_int_var(1, max(1, most), "total")
        model.add(sum(entering) == self._total)

    def _edge(self, tail: str, head: str, limit_tokens_per_s: float) -> tuple[Any, Any]:
        limit = self._units(limit_tokens_per_s)
        flow = self._model.new_int_var(0, limit, "flow")
        is_open = self._model.new_bool_var("open")
        self._model.add(flow == 0).only_enforce_if(is_open.Not())
        self._flows[tail, head] = flow, is_open
        return flow, is_open

    def _units(self, tokens_per_s: float) -> int:
        return int(min(UNITS_MAX, tokens_per_s * self._scale))

    def hint(self, assignments: Sequence[Assignment]) -> None:
        """Start the search from ``assignments``."""
        spans = {(a.peer_id, a.start, a.end - a.start) for a in assignments}
        for key, var in self._choices.items():
            self._model.add_hint(var, key in spans)
        if not assignments:
            return
        carried = {
            (e.tail, e.head): int(e.tokens_per_s * self._scale)
            for e in solve_flow(self._problem, assignments).edges
        }
        for edge, (flow, is_open) in self._flows.items():
            self._model.add_hint(flow, carried.get(edge, 0))
            self._model.add_hint(is_open, edge in carried)

    def maximise_flow(self, limit_s: float) -> bool:
        """Maximise the flow; returns whether a placement with flow was found."""
        self._model.maximize(self._total)
        return self._run(limit_s)

    def prefer_short(self, limit_s: float) -> None:
        """Within 2% of the flow found, minimise the peers used, then the layers moved.

        Every token passes every layer once, so fewer peers mean fewer and longer stages.
        """
        self._model.add(self._total >= int(self._found * WITHIN))
        held = {n.peer_id: n.current for n in self._problem.nodes if n.current is not None}
        moved = [
            (var, fetched(held.get(peer), at, at + count))
            for (peer, at, count), var in self._choices.items()
        ]
        moves = self._cp.LinearExpr.weighted_sum([v for v, _ in moved], [n for _, n in moved])
        most = len(self._peers) * self._layers + 1
        self._model.minimize(most * sum(self._used.values()) + moves)
        self._model.clear_hints()
        best = {(a.peer_id, a.start, a.end - a.start) for a in self.best or ()}
        for key, var in self._choices.items():
            self._model.add_hint(var, key in best)
        self._run(limit_s)

    def _run(self, limit_s: float) -> bool:
        solver = self._cp.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.05, limit_s)
        solver.parameters.num_workers = WORKERS
        solver.parameters.random_seed = self._seed % (1 << 31)
        status = solver.solve(self._model)
        if status not in {self._cp.OPTIMAL, self._cp.FEASIBLE}:
            return False
        self._found = solver.value(self._total)
        self.best = tuple(
            Assignment(peer_id=peer, start=at, end=at + count)
            for (peer, at, count), var in self._choices.items()
            if solver.value(var)
        )
        return True


def fetched(held: Assignment | None, start: int, end: int) -> int:
    """The number of layers of ``[start, end)`` that the peer does not hold yet."""
    if held is None:
        return end - start
    return end - start - max(0, min(end, held.end) - max(start, held.start))
