"""Chooses which chains live together: the master problem of column generation, by OR-Tools. Pure.

Each known chain is a column; a peer is in one chosen column at most. GLOP solves the linear
relaxation, whose duals are prices of peers: a further chain helps only if it is worth more than its
peers' prices together, and the dynamic program looks for such chains
(:meth:`coordinator.search.chain_dp.Row.cheapest`). CP-SAT then chooses whole columns. The method is
Gilmore and Gomory's (1961). A column counts with a guess until the estimate has judged it, as that
takes a hundred times as long.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.search.chain_dp import Chain, Chains


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterConfig:
    """How long and how exactly columns are chosen."""

    work_s: float = 0.3
    """Deterministic time of CP-SAT for one choice, in its seconds."""
    units: int = 10**9
    """Units into which the best column's worth is divided: CP-SAT takes whole numbers."""


class Master:
    """The chains known so far, and which of them serve the most together.

    OR-Tools is imported here. Whatever that, or its solvers, raise is the caller's to catch.
    """

    def __init__(self, config: MasterConfig | None = None) -> None:
        from ortools.math_opt.python import mathopt  # which takes 0.4 s

        self._config = config or MasterConfig()
        self._mathopt = mathopt
        self._program = mathopt.Model()
        self._program.objective.is_maximize = True
        self._relaxed = mathopt.IncrementalSolver(self._program, mathopt.SolverType.GLOP)
        self._variables: dict[Chain, Any] = {}
        self._peers: dict[str, Any] = {}
        self._guess: dict[Chain, float] = {}
        self._worth: dict[Chain, float] = {}
        self._ratio = 1.0
        self.solves = 0
        """Solves so far, by GLOP and by CP-SAT."""

    def __len__(self) -> int:
        return len(self._variables)

    def offer(self, chain: Chain, guess: float) -> bool:
        """Offer a chain that serves about ``guess`` tokens/s; False: it is known, or worthless."""
        if chain in self._variables or guess <= 0:
            return False
        self._guess[chain] = guess
        self._variables[chain] = variable = self._program.add_variable(lb=0.0, ub=1.0)
        self._program.objective.set_linear_coefficient(variable, self.worth(chain, guess))
        for held in chain:
            if held.peer_id not in self._peers:
                self._peers[held.peer_id] = self._program.add_linear_constraint(ub=1.0)
            self._peers[held.peer_id].set_coefficient(variable, 1.0)
        return True

    def settle(self, chain: Chain, worth: float) -> None:
        """Say what a chain serves by itself, in tokens/s."""
        self._worth[chain] = worth
        if not self.offer(chain, worth) and chain in self._variables:
            self._program.objective.set_linear_coefficient(self._variables[chain], worth)

    def settled(self, chain: Chain) -> bool:
        """Whether it is known what a chain serves."""
        return chain in self._worth

    def trust(self, ratio: float) -> None:
        """Count chains that are not settled with ``ratio`` times their guess."""
        self._ratio = ratio
        for chain, variable in self._variables.items():
            if chain not in self._worth:
                self._program.objective.set_linear_coefficient(variable, self.worth(chain, 0.0))

    def worth(self, chain: Chain, guess: float) -> float:
        """What a chain counts with, in tokens/s; ``guess`` is for one that was not offered."""
        known = self._worth.get(chain)
        return self._ratio * self._guess.get(chain, guess) if known is None else known

    def best(self, count: int) -> list[Chain]:
        """The settled chains that are worth the most, best first."""
        return sorted(self._worth, key=lambda chain: -self._worth[chain])[:count]

    def packed(self, first: Chain, *, settled: bool = False) -> Chains:
        """``first``, and beside it the chains that count the most, one after the other; or of the
        settled ones alone."""
        taken, packed = {a.peer_id for a in first}, [first]
        for chain in sorted(
            self._worth if settled else self._variables, key=lambda chain: -self.worth(chain, 0.0)
        ):
            peers = {a.peer_id for a in chain}
            if not peers & taken:
                taken |= peers
                packed.append(chain)
        return in_order(packed)

    def prices(self) -> Mapping[str, float]:
        """Tokens/s that one more of each peer would be worth, by the linear relaxation's duals.

        Peers without a price are in no column. Raises RuntimeError where GLOP finds no optimum.
        """
        result = self._relaxed.solve()
        self._counted(result)
        return {peer: max(0.0, result.dual_values(row)) for peer, row in self._peers.items()}

    def chosen(self) -> Chains:
        """The chains that serve the most together, by CP-SAT; empty: none is known.

        Raises RuntimeError where CP-SAT finds nothing in its time.
        """
        worths = {chain: self.worth(chain, 0.0) for chain in self._variables}
        most = max(worths.values(), default=0.0)
        if most <= 0:
            return ()
        mathopt = self._mathopt
        program = mathopt.Model()
        program.objective.is_maximize = True
        taken = {chain: program.add_binary_variable() for chain in worths}
        peers: dict[str, list[Any]] = {}
        for chain, variable in taken.items():
            units = round(self._config.units * worths[chain] / most)
            program.objective.set_linear_coefficient(variable, units)
            for held in chain:
                peers.setdefault(held.peer_id, []).append(variable)
        for each in peers.values():
            program.add_linear_constraint(mathopt.fast_sum(each) <= 1)
        parameters = mathopt.SolveParameters(threads=1, random_seed=0)
        parameters.cp_sat.max_deterministic_time = self._config.work_s
        result = mathopt.solve(program, mathopt.SolverType.CP_SAT, params=parameters)
        self._counted(result)
        values = result.variable_values
        return in_order(chain for chain, variable in taken.items() if values(variable) > 0.5)

    def _counted(self, result: Any) -> None:
        self.solves += 1
        reason, reasons = result.termination.reason, self._mathopt.TerminationReason
        if reason not in {reasons.OPTIMAL, reasons.FEASIBLE}:
            raise RuntimeError(f"the master problem ended as {reason.name.lower()}")


def in_order(chains: Iterable[Chain]) -> Chains:
    """The chains in an order of their own, so that equal sets are equal."""
    return tuple(sorted(chains, key=lambda chain: [(a.start, a.peer_id) for a in chain]))
