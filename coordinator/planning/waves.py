"""Orders peers' moves to a new placement in waves, so that no layer loses its last holder.

Make before break: a wave begins when all moves of the waves before it are done; within a wave,
moves begin and end in any order. A peer that can hold both ranges serves its old one until the
new one is loaded; any other peer serves nothing while it loads. Pure.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dht.messages.types import Assignment, ModelSpec, stage_bytes, weight_bytes

LOOKS_MAX = 100_000
"""Maximum moves that the search for a safe order looks at; then the least harmful move is taken."""
REACHED_LOOKS_MAX = 2_000
"""The same for one placement of many that a planner weighs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Peers that move at the same time."""

    peers: tuple[str, ...]
    breaks: tuple[int, ...] = ()
    """Layers that may have no holder during the wave; only where no safe order was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    peer_id: str
    old: range
    new: range
    keeps: bool

    @property
    def gone(self) -> tuple[int, ...]:
        """Layers served before the move that may lack this holder while it moves."""
        return tuple(ly for ly in self.old if not (self.keeps and ly in self.new))


def waves(
    old: Sequence[Assignment], new: Sequence[Assignment], keeping: Collection[str] = ()
) -> tuple[Wave, ...]:
    """Waves that lead from what is served (``old``) to the placement ``new``.

    Peers that ``new`` does not name stay as they are. ``keeping`` are the peers that can hold the
    old and the new range at once (:func:`keepers`). A layer with a holder keeps one throughout
    whenever some order of moves allows it: the search is exact within ``LOOKS_MAX`` looks, which
    only a dozen or more moves that all need each other's layers use up.
    """
    before, moves = _spans(old), _moves(old, new, keeping)
    standing = _standing(before, moves)
    order: list[Wave] = []
    budget = _Budget(LOOKS_MAX)
    while moves:
        taken = _safe_order(standing, moves, budget)
        if taken is None:
            taken = (_least_harm(standing, moves),)
        for wave in taken:
            order.append(wave)
            for peer_id in wave.peers:
                standing.add(moves.pop(peer_id).new)
    return _merged(before, order, new, keeping)


def can_be_reached(serving: Sequence[Assignment], placement: Sequence[Assignment]) -> bool:
    """Whether peers could reach ``placement`` from the layers that they are ``serving``.

    A peer gives up a layer for good only while another peer of the placement holds it
    (:mod:`coordinator.plans.move_waits`), so some would otherwise wait for each other for ever.
    Where no order is found within ``REACHED_LOOKS_MAX`` looks, the answer is no.
    """
    planned = {a.peer_id for a in placement}
    held = [a for a in serving if a.peer_id in planned]
    moves = _moves(held, placement, keeping=planned)
    standing = _standing(_spans(held), moves)
    return _safe_order(standing, moves, _Budget(REACHED_LOOKS_MAX)) is not None


def _spans(assignments: Iterable[Assignment]) -> dict[str, range]:
    return {a.peer_id: range(a.start, a.end) for a in assignments if a.start < a.end}


def _moves(
    old: Sequence[Assignment], new: Sequence[Assignment], keeping: Collection[str]
) -> dict[str, _Move]:
    before = _spans(old)
    return {
        a.peer_id: _Move(
            peer_id=a.peer_id,
            old=before.get(a.peer_id, range(0)),
            new=range(a.start, a.end),
            keeps=a.peer_id in keeping,
        )
        for a in new
        if before.get(a.peer_id, range(0)) != range(a.start, a.end)
    }


def _standing(before: Mapping[str, range], moves: Collection[str]) -> "_Cover":
    """The holders that do not move."""
    return _Cover(span for peer_id, span in before.items() if peer_id not in moves)


def keepers(
    model: ModelSpec,
    memory_bytes: Mapping[str, int],
    kv_tokens: Mapping[str, int],
    old: Sequence[Assignment],
    new: Sequence[Assignment],
) -> frozenset[str]:
    """Peers whose memory holds their old and new layers at once, each with its minimum KV room."""
    then = {a.peer_id: a for a in new}
    found = set()
    for a in old:
        b = then.get(a.peer_id)
        if b is None or a.peer_id not in memory_bytes:
            continue
        tokens = kv_tokens.get(a.peer_id, 0)
        need = stage_bytes(model, a.start, a.end, tokens) + stage_bytes(
            model, b.start, b.end, tokens
        )
        shared = range(max(a.start, b.start), min(a.end, b.end))
        need -= weight_bytes(model, shared.start, shared.stop) if shared else 0
        if need <= memory_bytes[a.peer_id]:
            found.add(a.peer_id)
    return frozenset(found)


@dataclass(slots=True)
class _Budget:
    looks: int

    def spend(self, looks: int) -> bool:
        """Spend ``looks``; returns whether they were left."""
        self.looks -= looks
        return self.looks >= 0


class _Cover:
    """The number of holders of each layer."""

    def __init__(self, spans: Iterable[range]) -> None:
        self.counts: dict[int, int] = {}
        for span in spans:
            self.add(span)

    def add(self, span: Iterable[int], times: int = 1) -> None:
        for layer in span:
            self.counts[layer] = self.counts.get(layer, 0) + times

    def copy(self) -> "_Cover":
        same = _Cover(())
        same.counts = dict(self.counts)
        return same

    def __getitem__(self, layer: int) -> int:
        return self.counts.get(layer, 0)


def _safe_order(
    standing: _Cover, moves: Mapping[str, _Move], budget: _Budget
) -> tuple[Wave, ...] | None:
    """Waves that move all peers and break no layer, or None. Depth first, without recursion."""
    seen: set[frozenset[str]] = set()
    # Per step taken: the holders that stay, the peers left to move, the moves not tried yet.
    path: list[tuple[_Cover, frozenset[str], list[tuple[str, ...]]]] = []
    taken: list[tuple[str, ...]] = []
    cover, left = standing, frozenset(moves)
    while left:
        tries: list[tuple[str, ...]] = []
        if left not in seen and budget.spend(len(left)):
            seen.add(left)
            tries = _tries(cover, moves, left)
        path.append((cover, left, tries))
        while path and not path[-1][2]:
            path.pop()
        if not path:
            return None
        cover, left, tries = path[-1]
        peers = tries.pop()
        del taken[len(path) - 1 :]
        taken.append(peers)
        cover = cover.copy()
        for peer_id in peers:
            cover.add(moves[peer_id].new)
        left -= frozenset(peers)
    return tuple(Wave(peers=peers) for peers in taken)


def _tries(
    cover: _Cover, moves: Mapping[str, _Move], left: frozenset[str]
) -> list[tuple[str, ...]]:
    """Sets of peers that may move next; the last one is to be tried first."""
    # A move whose layers all have holders that no longer move can never hinder another: make all
    # of these at once, and try nothing else.
    free = tuple(p for p in sorted(left) if all(cover[layer] > 0 for layer in moves[p].gone))
    if free:
        return [free]
    holders = _held(cover, moves, left)
    single = [p for p in sorted(left) if all(holders[layer] > 1 for layer in moves[p].gone)]
    return [(p,) for p in reversed(single)]


def _held(standing: _Cover, moves: Mapping[str, _Move], left: Iterable[str]) -> _Cover:
    holders = standing.copy()
    for peer_id in left:
        holders.add(moves[peer_id].old)
    return holders


def _least_harm(standing: _Cover, moves: Mapping[str, _Move]) -> Wave:
    """The move that leaves the fewest layers without a holder."""
    holders = _held(standing, moves, moves)

    def broken(peer_id: str) -> tuple[int, ...]:
        return tuple(layer for layer in moves[peer_id].gone if holders[layer] == 1)

    chosen = min(sorted(moves), key=lambda p: len(broken(p)))
    return Wave(peers=(chosen,), breaks=broken(chosen))


def _merged(
    before: Mapping[str, range],
    order: Sequence[Wave],
    new: Sequence[Assignment],
    keeping: Collection[str],
) -> tuple[Wave, ...]:
    """Neighbouring waves merged where that breaks no layer: fewer waits."""
    then = {a.peer_id: range(a.start, a.end) for a in new}
    held = dict(before)
    merged: list[Wave] = []
    start = dict(held)
    for wave in order:
        if merged and not wave.breaks and not merged[-1].breaks:
            both = (*merged[-1].peers, *wave.peers)
            if not at_risk(start, then, both, keeping):
                merged[-1] = Wave(peers=both)
                held.update((p, then[p]) for p in wave.peers)
                continue
        start = dict(held)
        merged.append(wave)
        held.update((p, then[p]) for p in wave.peers)
    return tuple(merged)


def at_risk(
    held: Mapping[str, range],
    then: Mapping[str, range],
    moving: Collection[str],
    keeping: Collection[str],
) -> tuple[int, ...]:
    """Layers of ``held`` that may have no holder while ``moving`` peers move, in any order."""
    sure = _Cover(span for peer_id, span in held.items() if peer_id not in moving)
    for peer_id in moving:
        if peer_id in keeping:
            old = held.get(peer_id, range(0))
            sure.add(layer for layer in old if layer in then[peer_id])
    served = {layer for span in held.values() for layer in span}
    return tuple(sorted(layer for layer in served if sure[layer] == 0))
