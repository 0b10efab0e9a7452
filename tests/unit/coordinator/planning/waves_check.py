"""Waves of moves checked by playing them through, independent of how they were found. Pure."""

from collections.abc import Collection, Sequence

from coordinator.planning.waves import Wave
from dht.messages.types import Assignment


def check_waves(
    old: Sequence[Assignment],
    new: Sequence[Assignment],
    keeping: Collection[str],
    waves: Sequence[Wave],
) -> list[str]:
    """What is wrong with ``waves`` as the way from ``old`` to ``new``; empty when nothing is.

    Wrong are peers that move twice, never or needlessly, and layers that may lose their last
    holder though the wave does not say so.
    """
    serving = {a.peer_id: a for a in old if a.start < a.end}
    wanted = {a.peer_id: a for a in new}
    movers = sorted(p for p, a in wanted.items() if serving.get(p) != a)
    listed = sorted(p for wave in waves for p in wave.peers)
    wrong: list[str] = []
    if movers != listed:
        wrong.append(f"{', '.join(listed) or 'nobody'} move; {', '.join(movers)} should")
        return wrong
    for index, wave in enumerate(waves):
        layers = {layer for a in serving.values() for layer in range(a.start, a.end)}
        wrong += [
            f"layer {layer} may lose its last holder in wave {index}"
            for layer in sorted(layers - set(wave.breaks))
            if not any(
                _always_holds(a, wanted.get(p), layer, p in wave.peers, p in keeping)
                for p, a in serving.items()
            )
        ]
        serving.update((p, wanted[p]) for p in wave.peers)
    return wrong


def _always_holds(
    now: Assignment, then: Assignment | None, layer: int, moves: bool, keeps: bool
) -> bool:
    """Whether a peer serves ``layer`` at every moment of a wave."""
    if not now.start <= layer < now.end:
        return False
    if not moves or then is None:
        return True
    return keeps and then.start <= layer < then.end
