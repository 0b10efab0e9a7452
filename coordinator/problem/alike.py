"""Whether a swarm has changed enough for a planner to look at it again. Pure."""

import math
from collections.abc import Iterator
from dataclasses import replace

from coordinator.problem.config import ASSUMED
from dht.messages.types import Problem

Of = tuple[str | int, ...]


def alike(one: Problem, other: Problem) -> bool:
    """Whether two problems have the same peers with the same layers and room, the same links, and
    rates and times that differ by less than ``ASSUMED.alike_within``.

    Layer times are compared at the numbers of rows that both problems have: a peer that serves adds
    some.
    """
    ours, theirs = dict(_rates(one)), dict(_rates(other))
    if _without_figures(one) != _without_figures(other) or ours.keys() != theirs.keys():
        return False
    ours |= _times(one)
    theirs |= _times(other)
    return all(
        math.isclose(figure, theirs[of], rel_tol=ASSUMED.alike_within)
        for of, figure in ours.items()
        if of in theirs
    )


def _without_figures(problem: Problem) -> Problem:
    bare = (
        replace(
            node,
            tokens_per_s=(),
            decode_layer_ns=(),
            prompt_layer_ns=(),
            up_bytes_per_s=None,
            down_bytes_per_s=None,
        )
        for node in problem.nodes
    )
    return replace(
        problem,
        nodes=tuple(bare),
        links=(),
        uplinks=tuple(
            replace(uplink, up_bytes_per_s=None, down_bytes_per_s=None)
            for uplink in problem.uplinks
        ),
    )


def _rates(problem: Problem) -> Iterator[tuple[Of, float]]:
    """Bandwidths, round-trip times and rates, each by the link or peer that has it."""
    for link in problem.links:
        yield (link.source, link.target, "bandwidth"), link.bandwidth_bytes_per_s
        yield (link.source, link.target, "rtt"), link.rtt_s
    for node in problem.nodes:
        for layers, rate in enumerate(node.tokens_per_s, start=1):
            yield (node.peer_id, "tokens", layers), rate
        for way, own in (("up", node.up_bytes_per_s), ("down", node.down_bytes_per_s)):
            if own is not None:
                yield (node.peer_id, "own", way), own
    for uplink in problem.uplinks:
        for way, own in (("up", uplink.up_bytes_per_s), ("down", uplink.down_bytes_per_s)):
            if own is not None:
                yield (uplink.name, "shared", way), own


def _times(problem: Problem) -> dict[Of, float]:
    return {
        (node.peer_id, kind, rows, context): time_ns
        for node in problem.nodes
        for kind, times in (("decode", node.decode_layer_ns), ("prompt", node.prompt_layer_ns))
        for rows, *both in times
        for context, time_ns in enumerate(both)
    }
