"""Chooses which chains live together: the master problem of column generation, by OR-Tools. Pure.

Each known chain is a column; a peer is in one chosen column at most, and those that pass a shared
uplink take no more of it than there is: one linear constraint for each direction of each. GLOP
solves the linear relaxation, whose duals are prices of peers: a further chain helps only if it is
worth more than its peers' prices together, and the dynamic program looks for such chains
(:meth:`coordinator.planning.search.chain_dp.Row.cheapest`). CP-SAT then chooses whole columns, of
which those over a shared uplink may serve a part of their worth. The method is Gilmore and Gomory's
(1961). A column counts with a guess until the estimate has judged it, as that takes a hundred times
as long.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.evaluation.shared_uplinks import Way
from coordinator.planning.search.chain_dp import Chain, Chains


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterConfig:
    """How long and how exactly columns are chosen."""

    work_s: float = 0.3
    """Deterministic time of CP-SAT for one choice, in its seconds."""
    units: int = 10**9
    """Units into which the best column's worth is divided: CP-SAT takes whole numbers."""
    parts: int = 1000
    """Parts of its worth that a column over a shared uplink may serve."""
    uses_max: float = 1e6
    """Maximum multiple of a shared uplink that a column counts as taking at its worth: solvers take
    no coefficients of 1e100."""


MASTER = MasterConfig()


def _nothing_shared(chain: Chain) -> Mapping[Way, float]:
    del chain
    return {}


class Master:
    """The chains known so far, and which of them serve the most together.

    OR-Tools is imported here. Whatever that, or its solvers, raise is the caller's to catch.
    """

    def __init__(
        self,
        uses_per_token: Callable[[Chain], Mapping[Way, float]] = _nothing_shared,
    ) -> None:
        """``uses_per_token`` tells which share of each shared uplink one token/s of a chain takes
        (:meth:`coordinator.planning.search.chain_judge.Judge.uses_per_token`)."""
        from ortools.math_opt.python import mathopt  # which takes 0.4 s

        self._mathopt = mathopt
        self._program = mathopt.Model()
        self._program.objective.is_maximize = True
        self._relaxed = mathopt.IncrementalSolver(self._program, mathopt.SolverType.GLOP)
        self._variables: dict[Chain, Any] = {}
        self._peers: dict[str, Any] = {}
        self._ways: dict[Way, Any] = {}
        self._uses_per_token = uses_per_token
        self._uses: dict[Chain, Mapping[Way, float]] = {}
        """The shares of shared uplinks that chains which pass some take at their worth."""
        self.tolls: Mapping[Way, float] = {}
        """Tokens/s that one more of each shared uplink would be worth, by the last prices."""
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
        self._take_uses(chain)
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
            self._take_uses(chain)

    def _take_uses(self, chain: Chain) -> None:
        """Let a column take of shared uplinks what it does at its present worth."""
        uses_per_token, before = self._uses_per_token(chain), self._uses.get(chain, {})
        if not uses_per_token and not before:
            return
        worth, most = self.worth(chain, 0.0), MASTER.uses_max
        self._uses[chain] = uses = {
            way: min(most, each * worth) for way, each in uses_per_token.items()
        }
        for way in before.keys() | uses.keys():
            if way not in self._ways:
                self._ways[way] = self._program.add_linear_constraint(ub=1.0)
            self._ways[way].set_coefficient(self._variables[chain], uses.get(way, 0.0))

    def settled(self, chain: Chain) -> bool:
        """Whether it is known what a chain serves."""
        return chain in self._worth

    def trust(self, ratio: float) -> None:
        """Count chains that are not settled with ``ratio`` times their guess."""
        self._ratio = ratio
        for chain, variable in self._variables.items():
            if chain not in self._worth:
                self._program.objective.set_linear_coefficient(variable, self.worth(chain, 0.0))
                self._take_uses(chain)

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
        self.tolls = {way: max(0.0, result.dual_values(row)) for way, row in self._ways.items()}
        return {peer: max(0.0, result.dual_values(row)) for peer, row in self._peers.items()}

    def chosen(self) -> Chains:
        """The chains that serve the most together, by CP-SAT; empty: none is known.

        It begins from those that count the most, one after the other, and they are what is chosen
        where its time is over before it found any: with hundreds of columns that comes before it
        has read them all. Raises RuntimeError where CP-SAT ends otherwise.
        """
        worths = {chain: self.worth(chain, 0.0) for chain in self._variables}
        best = max(worths, key=worths.__getitem__, default=())
        most = worths.get(best, 0.0)
        if most <= 0:
            return ()
        packed = self.packed(best)
        mathopt = self._mathopt
        program = mathopt.Model()
        program.objective.is_maximize = True
        taken = {chain: program.add_binary_variable() for chain in worths}
        peers: dict[str, list[Any]] = {}
        ways: dict[Way, list[Any]] = {}
        parts, served = MASTER.parts, {}
        for chain, variable in taken.items():
            units = round(MASTER.units * worths[chain] / most)
            if uses := self._uses.get(chain):
                # It may serve a part of its worth, where others pass the same uplinks.
                served[chain] = some = program.add_integer_variable(lb=0, ub=parts)
                program.add_linear_constraint(some <= parts * variable)
                program.objective.set_linear_coefficient(some, units / parts)
                for way, use in uses.items():
                    ways.setdefault(way, []).append(use * some)
            else:
                program.objective.set_linear_coefficient(variable, units)
            for held in chain:
                peers.setdefault(held.peer_id, []).append(variable)
        for each in peers.values():
            program.add_linear_constraint(mathopt.fast_sum(each) <= 1)
        for each in ways.values():
            program.add_linear_constraint(mathopt.fast_sum(each) <= parts)
        parameters = mathopt.SolveParameters(threads=1, random_seed=0)
        parameters.cp_sat.max_deterministic_time = MASTER.work_s
        hint = mathopt.SolutionHint(
            variable_values={variable: chain in packed for chain, variable in taken.items()}
        )
        result = mathopt.solve(
            program,
            mathopt.SolverType.CP_SAT,
            params=parameters,
            model_params=mathopt.ModelSolveParameters(solution_hints=[hint]),
        )
        if result.termination.reason is mathopt.TerminationReason.NO_SOLUTION_FOUND:
            self.solves += 1
            return packed
        self._counted(result)
        values = result.variable_values
        return in_order(
            chain for chain, variable in taken.items() if values(served.get(chain, variable)) > 0.5
        )

    def _counted(self, result: Any) -> None:
        self.solves += 1
        reason, reasons = result.termination.reason, self._mathopt.TerminationReason
        if reason not in {reasons.OPTIMAL, reasons.FEASIBLE}:
            raise RuntimeError(f"the master problem ended as {reason.name.lower()}")


def in_order(chains: Iterable[Chain]) -> Chains:
    """The chains in an order of their own, so that equal sets are equal."""
    return tuple(sorted(chains, key=lambda chain: [(a.start, a.peer_id) for a in chain]))
