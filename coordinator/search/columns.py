"""Chooses which chains live together: the master problem of column generation, by OR-Tools. Pure.

Each known chain is a column; a peer is in one chosen column at most. GLOP solves the linear
relaxation, whose duals are prices of peers: a further chain helps only if it is worth more than its
peers' prices together, and the dynamic program looks for such chains
(:meth:`coordinator.search.chain_dp.Row.cheapest`). CP-SAT then chooses whole columns. The method is
Gilmore and Gomory's (1961). A column is worth the rate of its slowest stage until it is chosen, and
what the estimate says from then on, as that takes a hundred times as long to find out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from coordinator.search.chain_dp import Chain, Chains

WORK_S = 0.3
"""Deterministic time of CP-SAT for one choice, in its seconds."""
UNITS = 10**9
"""Units into which the best column's worth is divided: CP-SAT takes whole numbers."""
RATIO_FIRST = 1.0
"""What the estimate says of a chain, as a share of its slowest stage's rate, before any is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What a search did, for those who ask how a plan was found."""

    columns: int = 0
    """Chains that were offered to the master problem."""
    judged: int = 0
    """Chains whose worth was estimated."""
    masters: int = 0
    """Solves of the master problem, by GLOP and by CP-SAT."""


class Master:
    """The chains known so far, and which of them serve the most together."""

    def __init__(self) -> None:
        from ortools.math_opt.python import mathopt

        self._mathopt = mathopt
        self._program = mathopt.Model()
        self._program.objective.is_maximize = True
        self._relaxed = mathopt.IncrementalSolver(self._program, mathopt.SolverType.GLOP)
        self._variables: dict[Chain, Any] = {}
        self._peers: dict[str, Any] = {}
        self._rate: dict[Chain, float] = {}
        self._worth: dict[Chain, float] = {}
        self._ratio = RATIO_FIRST
        self.masters = 0

    @property
    def searched(self) -> Searched:
        """What was done so far."""
        return Searched(columns=len(self._variables), judged=len(self._worth), masters=self.masters)

    def offer(self, chain: Chain, rate: float) -> bool:
        """Offer a chain whose slowest stage keeps up with ``rate`` tokens/s; False: it is known."""
        if chain in self._variables or rate <= 0:
            return False
        self._rate[chain] = rate
        variable = self._program.add_variable(lb=0.0, ub=1.0)
        self._variables[chain] = variable
        self._program.objective.set_linear_coefficient(variable, self._ratio * rate)
        for held in chain:
            if held.peer_id not in self._peers:
                self._peers[held.peer_id] = self._program.add_linear_constraint(ub=1.0)
            self._peers[held.peer_id].set_coefficient(variable, 1.0)
        return True

    def settle(self, chain: Chain, rate: float, worth: float) -> None:
        """Say what a chain would serve by itself, in tokens/s."""
        self.offer(chain, max(rate, worth, 1e-9))
        self._worth[chain] = worth
        self._program.objective.set_linear_coefficient(self._variables[chain], worth)

    def settled(self, chain: Chain) -> bool:
        """Whether a chain's worth is known."""
        return chain in self._worth

    def trust(self, ratio: float) -> None:
        """Take chains of unknown worth for ``ratio`` times their slowest stage's rate."""
        self._ratio = ratio
        for chain, variable in self._variables.items():
            if chain not in self._worth:
                self._program.objective.set_linear_coefficient(variable, ratio * self._rate[chain])

    def prices(self) -> Mapping[str, float]:
        """Tokens/s that one more of each peer would be worth, by the linear relaxation's duals.

        Peers without a price are in no column. Raises RuntimeError where GLOP finds no optimum.
        """
        result = self._relaxed.solve()
        self._counted(result)
        return {peer: max(0.0, result.dual_values(row)) for peer, row in self._peers.items()}

    def chosen(self) -> Chains:
        """The chains that serve the most together, by CP-SAT; empty: none is known.

        Raises RuntimeError where CP-SAT finds nothing in ``WORK_S``.
        """
        most = max((self._value(chain) for chain in self._variables), default=0.0)
        if most <= 0:
            return ()
        mathopt = self._mathopt
        program = mathopt.Model()
        program.objective.is_maximize = True
        chosen = {}
        peers: dict[str, list[Any]] = {}
        for chain in self._variables:
            chosen[chain] = variable = program.add_binary_variable()
            units = round(UNITS * self._value(chain) / most)
            program.objective.set_linear_coefficient(variable, units)
            for held in chain:
                peers.setdefault(held.peer_id, []).append(variable)
        for taken in peers.values():
            program.add_linear_constraint(mathopt.fast_sum(taken) <= 1)
        parameters = mathopt.SolveParameters(threads=1, random_seed=0)
        parameters.cp_sat.max_deterministic_time = WORK_S
        result = mathopt.solve(program, mathopt.SolverType.CP_SAT, params=parameters)
        self._counted(result)
        return tuple(c for c, variable in chosen.items() if result.variable_values(variable) > 0.5)

    def value(self, chain, rate_of):
        if chain in self._worth: return self._worth[chain]
        return self._ratio * rate_of(chain)

    def _value(self, chain: Chain) -> float:
        return self._worth.get(chain, self._ratio * self._rate[chain])

    def _counted(self, result: Any) -> None:
        self.masters += 1
        reason, reasons = result.termination.reason, self._mathopt.TerminationReason
        if reason not in {reasons.OPTIMAL, reasons.FEASIBLE}:
            raise RuntimeError(f"the master problem ended as {reason.name.lower()}")
