"""Improves chains by small random moves, judged by the estimate: the last step of the planner.

The dynamic program keeps peers in one order; this step tries every peer and link.
Moves: give a layer to another stage, move a peer to another stage, swap two peers, swap two stages,
split a stage in two, join it with the next, add an idle peer to a stage.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from coordinator.planning.search.chain_dp import Chains
from coordinator.planning.search.config import SEARCH
from dht.messages.types import Assignment, PlannerNode, Problem, fits


@dataclass(frozen=True, slots=True)
class ChainStage:
    """Peers that hold the same layers of one chain."""

    layers: int
    peers: tuple[str, ...]


Layout = tuple[tuple[ChainStage, ...], ...]
"""Stages of every chain; peers in no stage are idle."""


def improve_by_moves(
    problem: Problem,
    chains: Chains,
    *,
    judge: Callable[[Chains, float, Chains], float],
    seed: int,
    go_on: Callable[[int], bool],
    stale_max: int | None = None,
) -> tuple[Chains, float]:
    """The best chains found while ``go_on(moves tried)`` was true, and their worth.

    The search also ends after ``stale_max`` moves in a row without gain. ``judge(chains, least,
    near)`` returns the worth of chains, or any value below ``least`` once it is most probably below
    that, as far as those of ``near`` tell, from which they were moved.
    """
    rng = random.Random(seed)  # noqa: S311 - a search, not a secret
    nodes = {node.peer_id: node for node in problem.nodes}
    best = layout_of(chains)
    near = spans_of(best)
    worth = judge(near, 0.0, ())
    tried = stale = since = 0
    while go_on(tried) and (stale_max is None or since < stale_max):
        tried += 1
        since += 1
        candidate: Layout | None = best
        for _ in range(1 if stale < SEARCH.patience else rng.randint(1, SEARCH.kicks)):
            candidate = _moved(candidate, sorted(nodes), rng) if candidate else None
        if candidate is None or candidate == best or not _fits(problem, nodes, candidate):
            continue
        stale += 1
        moved = spans_of(candidate)
        value = judge(moved, worth, near)
        if value > worth:
            best, near, worth, stale, since = candidate, moved, value, 0, 0
    return near, worth


def layout_of(chains: Chains) -> Layout:
    """The chains as stages; a chain's spans must be equal or follow each other without overlap."""
    found = []
    for chain in chains:
        ranges = sorted({(a.start, a.end) for a in chain})
        found.append(
            tuple(
                ChainStage(
                    end - start,
                    tuple(sorted(a.peer_id for a in chain if (a.start, a.end) == (start, end))),
                )
                for start, end in ranges
            )
        )
    return tuple(found)


def spans_of(layout: Layout) -> Chains:
    """The spans of every chain."""
    return tuple(tuple(_spans(chain)) for chain in layout)


def _spans(chain: Sequence[ChainStage]) -> Iterator[Assignment]:
    at = 0
    for stage in chain:
        for peer in stage.peers:
            yield Assignment(peer_id=peer, start=at, end=at + stage.layers)
        at += stage.layers


def _fits(problem: Problem, nodes: dict[str, PlannerNode], layout: Layout) -> bool:
    return all(
        fits(problem.model, nodes[a.peer_id], a.start, a.end)
        for chain in spans_of(layout)
        for a in chain
    )


def _moved(layout: Layout, names: Sequence[str], rng: random.Random) -> Layout | None:
    """The layout after one random move; None if the drawn move is impossible."""
    which = rng.randrange(len(layout))
    chain = layout[which]
    dice = rng.random()
    if dice < 0.35 and len(chain) > 1:
        changed = _shift(chain, rng)
    elif dice < 0.42 and len(chain) > 1:
        changed = _join(chain, rng)
    elif dice < 0.49:
        changed = _split(chain, rng)
    elif dice < 0.54 and len(chain) > 1:
        changed = _reorder(chain, rng)
    else:
        return _move_peer(layout, names, rng)
    return (*layout[:which], changed, *layout[which + 1 :]) if changed else None


def _shift(chain: tuple[ChainStage, ...], rng: random.Random) -> tuple[ChainStage, ...] | None:
    """One stage gives a layer to another stage, not only to its neighbour."""
    giver, taker = rng.sample(range(len(chain)), 2)
    if chain[giver].layers < 2:
        return None
    stages = list(chain)
    stages[giver] = replace(stages[giver], layers=stages[giver].layers - 1)
    stages[taker] = replace(stages[taker], layers=stages[taker].layers + 1)
    return tuple(stages)


def _join(chain: tuple[ChainStage, ...], rng: random.Random) -> tuple[ChainStage, ...]:
    at = rng.randrange(len(chain) - 1)
    a, b = chain[at], chain[at + 1]
    joined = ChainStage(a.layers + b.layers, tuple(sorted(a.peers + b.peers)))
    return (*chain[:at], joined, *chain[at + 2 :])


def _split(chain: tuple[ChainStage, ...], rng: random.Random) -> tuple[ChainStage, ...] | None:
    at = rng.randrange(len(chain))
    stage = chain[at]
    if stage.layers < 2 or len(stage.peers) < 2:
        return None
    peers = list(stage.peers)
    rng.shuffle(peers)
    cut, layers = rng.randint(1, len(peers) - 1), rng.randint(1, stage.layers - 1)
    parts = (
        ChainStage(layers, tuple(sorted(peers[:cut]))),
        ChainStage(stage.layers - layers, tuple(sorted(peers[cut:]))),
    )
    return (*chain[:at], *parts, *chain[at + 1 :])


def _reorder(chain: tuple[ChainStage, ...], rng: random.Random) -> tuple[ChainStage, ...]:
    stages = list(chain)
    a, b = rng.sample(range(len(stages)), 2)
    stages[a], stages[b] = stages[b], stages[a]
    return tuple(stages)


def _move_peer(layout: Layout, names: Sequence[str], rng: random.Random) -> Layout | None:
    """A random peer goes to another stage, or swaps places with a peer there."""
    peer = rng.choice(names)
    which = rng.randrange(len(layout))
    at = rng.randrange(len(layout[which]))
    target = layout[which][at]
    if peer in target.peers:
        return None
    other = rng.choice(target.peers) if rng.random() < 0.5 else None
    stages: list[tuple[ChainStage, ...]] = []
    for chain in layout:
        changed = []
        for stage in chain:
            peers = set(stage.peers)
            if stage is target:
                peers = (peers - {other}) | {peer}
            elif peer in peers:
                peers = (peers - {peer}) | ({other} if other else set())
            if not peers:
                return None
            changed.append(replace(stage, peers=tuple(sorted(name for name in peers if name))))
        stages.append(tuple(changed))
    return tuple(stages)
