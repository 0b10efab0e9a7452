"""A model's sizes in the precision of a peer that has not joined yet. Pure.

A model is announced with its sizes in the precision of whoever announces it. How much of it fits a
volunteer, and how much that would fetch, depends on the volunteer's own.
"""

import math
from dataclasses import replace

from dht.messages.types import ModelSpec

BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "int8": 8.0, "int4": 4.5}
"""Bits of a weight. In 4 bits, 64 weights share a scale of 32 bits."""
QUANTISED = ("int8", "int4")
"""Those that a peer can pack weights into itself."""
PUBLISHED = "bfloat16"
"""Precision that the files of most models are in."""


def precision_text(dtype: str, quantize: str | None) -> str:
    """A peer's precision as it announces it: the dtype, or the quantisation of its layers."""
    return dtype if quantize is None else f"{quantize} in {dtype}"


def in_precision(model: ModelSpec, told: str, wanted: str) -> ModelSpec:
    """``model``, whose sizes are in precision ``told``, with about those in ``wanted``.

    Both are as of :func:`precision_text`; where one is anything else, the sizes stay.
    """
    bits, dtype_bits = _bits(told)
    wanted_bits, wanted_dtype_bits = _bits(wanted)
    if not (bits and dtype_bits and wanted_bits and wanted_dtype_bits):
        return model
    layers, others = wanted_bits / bits, wanted_dtype_bits / dtype_bits
    return replace(
        model,
        layer_bytes=math.ceil(model.layer_bytes * layers),
        layer_sizes=tuple(math.ceil(size * layers) for size in model.layer_sizes),
        embed_bytes=math.ceil(model.embed_bytes * others),
        head_bytes=math.ceil(model.head_bytes * others),
        kv_bytes_per_token_layer=math.ceil(model.kv_bytes_per_token_layer * others),
    )


def _bits(precision: str) -> tuple[float, float]:
    """Bits of a layer's weights, and of all other numbers; 0 where that is not known."""
    weights, _, dtype = precision.partition(" in ")
    return BITS.get(weights, 0.0), BITS.get(dtype or weights, 0.0)
