"""How fast a client takes peers to be, beyond their own word. Pure.

Anybody can announce any speed, under any number of names. A client knows the peers that its owner
named, and those over which its own tokens came as soon as they had announced. Others count for
little more than the fastest of these; they earn more by serving, which takes one answer. How many
peers announce a speed counts for nothing.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from coordinator.policies.routing.quickest import token_s
from dht.messages.types import LayerTimes, NodeRecord

LOADS = 1, 16
"""Sessions at which announced times are compared: alone, and in a batch."""


def believed(
    nodes: Mapping[str, NodeRecord], known: Collection[str], times: float
) -> dict[str, NodeRecord]:
    """``nodes``, none faster than ``times`` the fastest of the ``known`` peers; those of ``known``
    as they announce. Where none of these is here, or says how fast it is, the slowest peer stands
    for them.

    T_j and the times of steps are each held to those of the known peers.
    """
    able = {p: record for p, record in nodes.items() if _layer_rate(record) > 0}
    seen = [able[p] for p in known if p in able]
    slowest = min(able.values(), key=lambda r: (_layer_rate(r), r.peer_id), default=None)
    if not seen and slowest is not None:
        seen = [slowest]
    rate_max = times * _most(map(_layer_rate, seen))
    speed_max = [times * _most(_speed(record, load) for record in seen) for load in LOADS]
    return {
        p: record if p in known else _held(record, rate_max, speed_max)
        for p, record in nodes.items()
    }


def _held(record: NodeRecord, rate_max: float, speed_max: Iterable[float]) -> NodeRecord:
    """``record`` with figures of at most these: T_j by a factor, and times by another."""
    rate = _layer_rate(record)
    if rate > rate_max:
        rates = tuple(rate_max / rate * each for each in record.tokens_per_s)
        record = replace(record, tokens_per_s=rates)
    over = _most(
        _speed(record, load) / limit
        for load, limit in zip(LOADS, speed_max, strict=True)
        if limit > 0
    )
    if over <= 1.0 or not record.decode_layer_ns:
        return record
    return replace(
        record,
        decode_layer_ns=_slower(record.decode_layer_ns, over),
        prompt_layer_ns=_slower(record.prompt_layer_ns, over),
    )


def _most(values: Iterable[float]) -> float:
    return max(values, default=0.0)


def _layer_rate(record: NodeRecord) -> float:
    """Layers × tokens/s by the peer's T_j, at the number of layers where that is the most."""
    return _most(j * rate for j, rate in enumerate(record.tokens_per_s, start=1))


def _speed(record: NodeRecord, sessions: int) -> float:
    """Layers/s of each of ``sessions`` that run at a time."""
    return 1.0 / max(token_s(record, 1, sessions), 1e-9)


def _slower(layer_times: LayerTimes, factor: float) -> LayerTimes:
    """Times of layers, each ``factor`` as long, and no less than 1 ns."""
    return tuple(
        (rows, int(factor * max(1, near_ns)), int(factor * max(1, far_ns)))
        for rows, near_ns, far_ns in layer_times
    )
