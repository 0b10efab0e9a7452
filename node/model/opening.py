"""Opens a model's files in a process that is to serve them."""

from dht.checkpoints.gguf_model import is_gguf
from node.model.lean_transformers import prepare_transformers
from node.weights.hashes import Progress
from node.weights.hub_shards import open_model
from node.weights.store import WeightStore


def open_lean(model: str, progress: Progress | None = None) -> WeightStore:
    """:func:`node.weights.hub_shards.open_model`. A GGUF file's text files are made by
    transformers, which is imported first as peers need it."""
    if is_gguf(model):
        prepare_transformers()
    return open_model(model, progress)
