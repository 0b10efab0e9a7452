"""Solves Helix's mixed-integer program as the paper writes it (§4.3-4.4), with open solvers.

It is for comparison only: on two dozen peers these solvers, run by MathOpt, find little in minutes.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from coordinator.evaluation.max_flow import (
    bandwidth_bytes_per_s,
    own_rates_bytes_per_s,
    upper_bound,
)
from coordinator.evaluation.shared_uplinks import Way, shared_uplinks
from coordinator.planning.heuristics.heuristics import span_limits
from dht.messages.types import SINK, SOURCE, Assignment, Problem


def solve_by_mathopt(
    problem: Problem, *, solver: str, time_limit_s: float
) -> tuple[Assignment, ...] | None:
    """The placement with the most flow found in time by ``highs`` or ``scip``; None: none found.

    The program has per peer an integer start and a binary per number of layers, and per pair of
    peers a flow and three binaries for whether the second can go on where the first ends. Every
    peer is assumed to hold the weights of the model's ends (Helix has none).
    """
    from ortools.math_opt.python import mathopt

    kinds = {"highs": mathopt.SolverType.HIGHS, "scip": mathopt.SolverType.GSCIP}
    program = _Program(problem, mathopt)
    parameters = mathopt.SolveParameters(time_limit=timedelta(seconds=time_limit_s))
    result = mathopt.solve(program.model, kinds[solver], params=parameters)
    if not result.has_primal_feasible_solution() or result.objective_value() <= 1e-6:
        return None
    return program.spans(result)


class _Program:
    def __init__(self, problem: Problem, mathopt: Any) -> None:
        self._problem = problem
        self._sum = mathopt.fast_sum
        self.model = mathopt.Model(name="helix")
        layers = problem.model.layers
        self._start: dict[str, Any] = {}
        self._holds: dict[str, dict[int, Any]] = {}
        self._end: dict[str, Any] = {}
        self._rate: dict[str, Any] = {}
        for node in problem.nodes:
            room = span_limits(problem, node)
            most = min(room.first, room.middle, room.last)
            start = self.model.add_integer_variable(lb=0, ub=layers)
            holds = {j: self.model.add_binary_variable() for j in range(1, most + 1)}
            if not holds:
                continue
            self.model.add_linear_constraint(self._sum(holds.values()) == 1)
            end = start + self._sum(j * var for j, var in holds.items())
            self.model.add_linear_constraint(end <= layers)
            rates = node.tokens_per_s
            self._start[node.peer_id], self._holds[node.peer_id] = start, holds
            self._end[node.peer_id] = end
            self._rate[node.peer_id] = self._sum(rates[j - 1] * var for j, var in holds.items())
        self._flow()

    def _flow(self) -> None:
        model, problem, layers = self.model, self._problem, self._problem.model.layers
        bandwidth = bandwidth_bytes_per_s(problem)
        most = 2 * upper_bound(problem) + 1
        client = min(most, problem.client_bandwidth_bytes_per_s / max(1, problem.token_bytes))
        into: dict[str, list[Any]] = {name: [] for name in (*self._start, SINK)}
        out: dict[str, list[Any]] = {name: [] for name in (SOURCE, *self._start)}
        from_peers: dict[str, list[Any]] = {name: [] for name in self._start}
        to_peers: dict[str, list[Any]] = {name: [] for name in self._start}
        own = own_rates_bytes_per_s(problem)
        rates = {name: own.get(name, (most, most)) for name in self._start}
        shared = shared_uplinks(problem)
        over: dict[Way, list[Any]] = {way: [] for way in shared.bytes_per_s}

        def edge(tail: str, head: str, limit: float) -> Any:
            flow, valid = model.add_variable(lb=0, ub=limit), model.add_binary_variable()
            model.add_linear_constraint(flow <= limit * valid)
            out[tail].append(flow)
            into[head].append(flow)
            if tail != SOURCE and head != SINK:
                to_peers[tail].append(flow)
                from_peers[head].append(flow)
            for way in shared.crossed(tail, head):
                over[way].append(flow)
            return valid

        for name, start in self._start.items():
            valid = edge(SOURCE, name, client)
            model.add_linear_constraint(start <= layers * (1 - valid))
            valid = edge(name, SINK, client)
            model.add_linear_constraint(layers * valid <= self._end[name])
            for other in self._start:
                if other == name:
                    continue
                limit = bandwidth(name, other) / max(1, problem.model.activation_bytes)
                valid = edge(name, other, min(most, limit))
                begins, goes_on = model.add_binary_variable(), model.add_binary_variable()
                model.add_linear_constraint(valid <= 0.5 * begins + 0.5 * goes_on)
                model.add_linear_constraint(
                    (layers + 1) * (1 - begins) >= self._start[other] - self._end[name]
                )
                model.add_linear_constraint(
                    self._end[other] - self._end[name] >= 1 - (layers + 1) * (1 - goes_on)
                )
        for name in self._start:
            model.add_linear_constraint(self._sum(into[name]) == self._sum(out[name]))
            model.add_linear_constraint(self._sum(into[name]) <= self._rate[name])
            for flows, rate in zip((to_peers[name], from_peers[name]), rates[name], strict=True):
                limit = min(most, rate / max(1, problem.model.activation_bytes))
                model.add_linear_constraint(self._sum(flows) <= limit)
        for way, flows in over.items():
            limit = min(most, shared.bytes_per_s[way] / max(1, problem.model.activation_bytes))
            model.add_linear_constraint(self._sum(flows) <= limit)
        model.maximize(self._sum(out[SOURCE]))

    def spans(self, result: Any) -> tuple[Assignment, ...]:
        """The spans of a result."""
        found: Sequence[tuple[str, int, int]] = [
            (
                name,
                round(result.variable_values(start)),
                max(holds, key=lambda j: result.variable_values(holds[j])),
            )
            for (name, start), holds in zip(self._start.items(), self._holds.values(), strict=True)
            for holds in [holds]
        ]
        return tuple(Assignment(peer_id=n, start=at, end=at + j) for n, at, j in found)
