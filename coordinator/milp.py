"""The exact placement: Helix's program (§4.3-4.5) in CP-SAT, for a dozen peers.

One Boolean per (peer, start, count) that fits; flows are whole numbers; an edge carries flow only
where its ends' layers follow each other.
"""

from collections.abc import Sequence
from typing import Any

from dht.types import Assignment, Problem, fits

UNITS_MAX = 10_000_000
"""The largest total flow in whole units: fine enough to compare, small enough to search."""


def solve(
    problem: Problem, *, time_limit_s: float, seed: int, hint: Sequence[Assignment]
) -> tuple[Assignment, ...] | None:
    """The placement with the most flow that was found in time, then with the fewest stages.

    None when none was found. ``hint`` is where the search starts.
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
        self._define_spans()
        self._define_flow()
        self.best: tuple[Assignment, ...] | None = None

    def _units_per_token(self) -> float:
        total = sum(max(node.tokens_per_s, default=0.0) for node in self._problem.nodes)
        return UNITS_MAX / max(total, 1e-9)

    def _define_spans(self) -> None:
        model = self._model
        self._start, self._end, self._rate, self._used = {}, {}, {}, {}
        for node in self._problem.nodes:
            mine = {key: var for key, var in self._choices.items() if key[0] == node.peer_id}
            used = model.new_bool_var("used")
            model.add(sum(mine.values()) == used)
            self._used[node.peer_id] = used
            self._start[node.peer_id] = sum(at * var for (_, at, _), var in mine.items())
            self._end[node.peer_id] = sum((at + n) * var for (_, at, n), var in mine.items())
            self._rate[node.peer_id] = sum(
                int(node.tokens_per_s[n - 1] * self._scale) * var for (_, _, n), var in mine.items()
            )

    def _define_flow(self) -> None:
        model, problem = self._model, self._problem
        measured = {(link.source, link.target): link for link in problem.links}
        inflow: dict[str, list[Any]] = {peer: [] for peer in self._peers}
        outflow: dict[str, list[Any]] = {peer: [] for peer in self._peers}
        client = problem.client_bandwidth_bytes_per_s / problem.token_bytes
        entering = []
        for peer in self._peers:
            first = self._edge(client)
            model.add(self._start[peer] == 0).only_enforce_if(first[1])
            model.add_implication(first[1], self._used[peer])
            last = self._edge(client)
            model.add(self._end[peer] == self._layers).only_enforce_if(last[1])
            inflow[peer].append(first[0])
            outflow[peer].append(last[0])
            entering.append(first[0])
            for other in self._peers:
                if other == peer:
                    continue
                link = measured.get((peer, other))
                bandwidth = (
                    problem.default_bandwidth_bytes_per_s
                    if link is None
                    else link.bandwidth_bytes_per_s
                )
                flow, is_open = self._edge(bandwidth / max(1, problem.model.activation_bytes))
                model.add(self._start[other] <= self._end[peer]).only_enforce_if(is_open)
                model.add(self._end[other] >= self._end[peer] + 1).only_enforce_if(is_open)
                model.add_implication(is_open, self._used[peer])
                outflow[peer].append(flow)
                inflow[other].append(flow)
        for peer in self._peers:
            model.add(sum(inflow[peer]) == sum(outflow[peer]))
            model.add(sum(inflow[peer]) <= self._rate[peer])
        self._total = sum(entering)

    def _edge(self, limit_tokens_per_s: float) -> tuple[Any, Any]:
        limit = int(min(UNITS_MAX, limit_tokens_per_s * self._scale))
        flow = self._model.new_int_var(0, limit, "flow")
        is_open = self._model.new_bool_var("open")
        self._model.add(flow == 0).only_enforce_if(is_open.Not())
        return flow, is_open

    def hint(self, assignments: Sequence[Assignment]) -> None:
        """Start from these spans."""
        spans = {(a.peer_id, a.start, a.end - a.start) for a in assignments}
        for key, var in self._choices.items():
            self._model.add_hint(var, key in spans)

    def maximise_flow(self, limit_s: float) -> bool:
        """Whether a placement with flow was found."""
        self._model.maximize(self._total)
        return self._run(limit_s)

    def prefer_short(self, limit_s: float) -> None:
        """Within 2% of the flow found: the fewest layers held on the way, then little movement.

        Fewer layers held in all means fewer overlapping and fewer stages, as every session's
        tokens pass every layer once anyway.
        """
        self._model.add(self._total >= int(self._found * 0.98))
        current = {
            (n.current.peer_id, n.current.start, n.current.end - n.current.start)
            for n in self._problem.nodes
            if n.current is not None
        }
        moved = [var for key, var in self._choices.items() if current and key not in current]
        stages = sum(self._used.values())
        self._model.minimize((len(self._peers) + 1) * stages + sum(moved))
        self._run(limit_s)

    def _run(self, limit_s: float) -> bool:
        solver = self._cp.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.05, limit_s)
        solver.parameters.num_workers = 2
        solver.parameters.random_seed = self._seed % (1 << 31)
        status = solver.solve(self._model)
        if status not in {self._cp.OPTIMAL, self._cp.FEASIBLE} or solver.value(self._total) == 0:
            return False
        self._found = solver.value(self._total)
        self.best = tuple(
            Assignment(peer_id=peer, start=at, end=at + count)
            for (peer, at, count), var in self._choices.items()
            if solver.value(var)
        )
        return True
