"""Column generation: the dynamic program prices chains, and OR-Tools chooses which live together.

A turn takes the master problem's prices of peers and looks for the cheapest chain of every target
flow, in one order of the peers: over all of them, or over those of a few chosen chains and the idle
ones (a large neighbourhood). Every few turns CP-SAT chooses among all columns; local moves improve
the choice by the guess, and its chains are judged by the estimate until all of them were.
"""

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from coordinator.evaluation.estimate import chains_bound, row_bytes_per_token
from coordinator.evaluation.max_flow import upper_bound
from coordinator.evaluation.shared_uplinks import Way, shared_uplinks
from coordinator.planning.heuristics.peer_regions import regions
from coordinator.planning.search.chain_dp import FLOWS, Chain, Chains, Row, orders
from coordinator.planning.search.chain_judge import Judge
from coordinator.planning.search.columns import Master
from coordinator.planning.search.config import SEARCH
from coordinator.planning.search.local_moves import improve_by_moves
from dht.messages.types import PlannerNode, Problem

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """The work of a turn, in numbers of small steps."""

    flows_apart: int = 6
    """Steps of the ladder of flows between those of one turn; the next turn takes the next ones."""
    turns_per_choice: int = 2
    turns_max: int = 40
    """Maximum turns without a clock."""
    moves: int = 800
    """Moves by the guess for every choice, which together take as long as eight estimates."""
    moves_per_look: int = 20
    """Moves between two looks at the clock."""
    choices_max: int = 6
    """Maximum choices in a row whose chains are not all judged."""
    freed_max: int = 2
    """Maximum chosen chains whose peers a neighbourhood frees."""
    packings: int = 12
    """Number of the best chains around which others are packed, for moves to begin from."""
    hope_share: float = 0.75
    """Chains are hoped to be as good, beside the guess, as this share of those judged lately was
    at most: a column that is taken for too little is never chosen, nor judged."""
    judged_lately: int = 30
    """Number of judged chains from which that is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What a search with OR-Tools did."""

    columns: int = 0
    """Chains priced: offered to the master problem."""
    judged: int = 0
    """Chains judged by the estimate."""
    masters: int = 0
    """Solves of the master problem, by GLOP and by CP-SAT."""
    bound_tokens_per_s: float = 0.0
    """What no placement of chains can exceed by the estimate."""
    failed: str = ""
    """Why OR-Tools did not choose; the placement is then that of heuristics and local moves."""

    def __add__(self, other: "Searched") -> "Searched":
        """What two searches over different peers did."""
        return Searched(
            columns=self.columns + other.columns,
            judged=self.judged + other.judged,
            masters=self.masters + other.masters,
            bound_tokens_per_s=self.bound_tokens_per_s + other.bound_tokens_per_s,
            failed=self.failed or other.failed,
        )


class Generation:
    """The columns of a problem, over all steps of a search.

    Where OR-Tools fails, its steps find nothing from then on, and ``searched`` says so.
    """

    def __init__(self, judge: Judge, *, seed: int, config: GenerationConfig | None = None) -> None:
        self._judge = judge
        self._config = config or GenerationConfig()
        self._master: Master | None = None
        self._rng = random.Random(seed)  # noqa: S311 - a search, not a secret
        self._ratios: list[float] = []
        self._fresh: list[Chain] = []
        """Chains priced since the last choice."""
        self._begun: set[Chains] = set()
        """What moves have begun from."""
        self._failed = ""

    @property
    def searched(self) -> Searched:
        """What was done so far."""
        return Searched(
            columns=len(self._master) if self._master is not None else 0,
            judged=len(self._judge.known),
            masters=self._master.solves if self._master is not None else 0,
            bound_tokens_per_s=chains_bound(self._judge.problem, self._judge.service),
            failed=self._failed,
        )

    def generated(
        self, at_load: Problem, go_on: Callable[[int], bool], rings: Sequence[Chain] = ()
    ) -> dict[Chains, float]:
        """Chains that live together, with their tokens/s, while ``go_on(turns)`` is true.

        Around each of the ``rings``, too, the best other chains are packed. ``at_load`` has the
        peers' rates under full load (:func:`coordinator.planning.search.full_load.at_full_load`).
        """
        made: dict[Chains, float] = {}
        if go_on(0):
            self._unless_it_fails(lambda: self._turns(at_load, go_on, made, rings), None)
        return made

    def chosen(self) -> Chains:
        """The best of all judged chains together; empty where no turn was taken, or OR-Tools
        failed."""
        master = self._master
        return self._unless_it_fails(lambda: self._chosen(master), ()) if master is not None else ()

    def _unless_it_fails(self, work: Callable[[], T], otherwise: T) -> T:
        if self._failed:
            return otherwise
        try:
            return work()
        except Exception as error:  # whatever a solver raises: the others' chains must count
            logger.exception("OR-Tools failed; heuristics and moves go on")
            self._failed = f"{type(error).__name__}: {error}"[: SEARCH.failed_characters_max]
            return otherwise

    def _turns(
        self,
        at_load: Problem,
        go_on: Callable[[int], bool],
        made: dict[Chains, float],
        rings: Sequence[Chain],
    ) -> None:
        """Price and choose while ``go_on(turns)``; ``made`` receives chains that live together."""
        config = self._config
        judge = self._judge
        master = self._master = self._master or Master(uses_per_token=judge.uses_per_token)
        self._take_judged(master)
        bound = upper_bound(replace(at_load, links=()))
        flows = [bound * step for step in FLOWS]
        for turn, row in enumerate(self._rows(at_load, made), start=1):
            first = turn % config.flows_apart
            self._price(master, row, flows[first :: config.flows_apart])
            if turn % config.turns_per_choice == 0:
                chains = self._moved(master, lambda turn=turn: go_on(turn))  # type: ignore[misc]
                made[chains] = self._judge(chains)
            if not go_on(turn):
                break
        for chain in (*rings, *master.best(config.packings)):
            chains = master.packed(chain, settled=True)
            made[chains] = self._judge(chains)

    def _chosen(self, master: Master) -> Chains:
        """The best choice, once all of its chains were judged by the estimate."""
        self._take_judged(master)
        chains: Chains = ()
        for _ in range(self._config.choices_max):
            chains = master.chosen()
            unknown = [chain for chain in chains if not master.settled(chain)]
            if not unknown:
                break
            for chain in unknown:
                worth = self._judge((chain,))
                master.settle(chain, worth)
                self._ratios.append(self._judge.ratio(chain, worth))
            lately = sorted(self._ratios[-self._config.judged_lately :])
            master.trust(lately[int(self._config.hope_share * (len(lately) - 1))])
        return chains

    def _take_judged(self, master: Master) -> None:
        for chain, worth in self._judge.known.items():
            if not master.settled(chain):
                master.settle(chain, worth)

    def _rows(self, at_load: Problem, made: Mapping[Chains, float]) -> Iterator[Row]:
        """Orders of peers: the dynamic program's own, then drawn ones without end."""
        region_of = regions(at_load)
        for order in orders(at_load.nodes, region_of):
            yield Row(at_load, order)
        neighbourhood = False
        while True:
            nodes: Sequence[PlannerNode] = at_load.nodes
            if neighbourhood and made:
                nodes = self._freed(at_load, max(made, key=made.__getitem__))
            yield Row(at_load, _shuffled(nodes, region_of, self._rng))
            neighbourhood = not neighbourhood

    def _freed(self, at_load: Problem, best: Chains) -> list[PlannerNode]:
        """The peers of some chains of the ``best``, and those that are in none."""
        freed = self._rng.sample(best, min(len(best), self._config.freed_max))
        staying = {a.peer_id for chain in best if chain not in freed for a in chain}
        return [node for node in at_load.nodes if node.peer_id not in staying]

    def _price(self, master: Master, row: Row, flows: Sequence[float]) -> None:
        prices = self._with_tolls(master.prices(), master.tolls)
        for peers_min in (1, SEARCH.holders):
            for flow in flows:
                chain = row.cheapest(flow, prices, peers_min)
                if chain is not None and master.offer(chain, self._judge.guess(chain)):
                    self._fresh.append(chain)

    def _with_tolls(
        self, prices: Mapping[str, float], tolls: Mapping[Way, float]
    ) -> Mapping[str, float]:
        """The prices of peers with those of the shared uplinks behind which they are, as if all
        tokens that a peer runs at most passed them: the dynamic program knows no links."""
        problem = self._judge.problem
        if not any(tolls.values()):
            return prices
        row_bytes = row_bytes_per_token(problem, self._judge.service.workload)
        rates = shared_uplinks(problem).bytes_per_s
        found = dict(prices)
        for node in problem.nodes:
            for way in ((node.uplink, "up"), (node.uplink, "down")):
                if toll := tolls.get(way, 0.0):
                    most = max(node.tokens_per_s, default=0.0) * row_bytes
                    share = min(1.0, most / max(rates[way], 1e-9))
                    found[node.peer_id] = found.get(node.peer_id, 0.0) + toll * share
        return found

    def _moved(self, master: Master, in_time: Callable[[], bool]) -> Chains:
        """The choice among all columns, after moves by the guess from the choice before them, if
        that is new, and from chains around one that was priced since."""
        starts = [master.chosen()]
        if starts[0] in self._begun:
            starts.clear()
        if self._fresh:
            starts.append(master.packed(self._rng.choice(self._fresh)))
        self._fresh.clear()
        for chains in starts:
            if not chains or not in_time():
                continue
            self._begun.add(chains)
            for chain in self._improved(master, chains, in_time):
                master.offer(chain, self._judge.guess(chain))
        return self._chosen(master)

    def _improved(self, master: Master, chains: Chains, in_time: Callable[[], bool]) -> Chains:
        """The chains after moves by the guess alone."""
        config, guess = self._config, self._judge.guess
        return improve_by_moves(
            self._judge.problem,
            chains,
            judge=lambda chains, *_: self._judge.combined(
                chains, lambda chain: master.worth(chain, guess(chain))
            ),
            seed=self._rng.randrange(1 << 30),
            go_on=lambda moves: (
                moves < config.moves and (moves % config.moves_per_look != 0 or in_time())
            ),
        )[0]


def _shuffled(
    nodes: Sequence[PlannerNode], region_of: Mapping[str, int], rng: random.Random
) -> tuple[PlannerNode, ...]:
    """The peers, region by region, in a drawn order."""
    by_region: dict[int, list[PlannerNode]] = {}
    for node in nodes:
        by_region.setdefault(region_of[node.peer_id], []).append(node)
    drawn: list[PlannerNode] = []
    for region in rng.sample(sorted(by_region), len(by_region)):
        drawn += rng.sample(by_region[region], len(by_region[region]))
    return tuple(drawn)
