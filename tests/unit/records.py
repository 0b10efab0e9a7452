"""What a peer announces, for tests that care for little of it."""

from typing import Any

from dht.messages.types import DeviceSpec, ModelSpec, NodeRecord, NodeState

MODEL = ModelSpec(
    name="m",
    root="f",
    layers=8,
    layer_bytes=1,
    embed_bytes=1,
    head_bytes=1,
    kv_bytes_per_token_layer=1,
    activation_bytes=1,
    context_tokens=64,
    vocab=10,
)


def record_of(peer_id: str, start: int = 0, end: int = 0, **fields: Any) -> NodeRecord:
    """A peer that serves ``[start, end)``, or waits where that is nothing, but for ``fields``."""
    said = {
        "name": peer_id,
        "software_version": "0",
        "device": DeviceSpec(kind="cpu", name="test", memory_bytes=1000),
        "model": MODEL,
        "memory_bytes": 1000,
        "kv_tokens_min": 0,
        "tokens_per_s": (100.0,) * MODEL.layers,
        "state": NodeState.SERVING if end > start else NodeState.WAITING,
    }
    return NodeRecord(peer_id=peer_id, start=start, end=end, **(said | fields))
