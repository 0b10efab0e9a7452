"""Mixtures of experts whose weights are packed: one expert after the other."""

from typing import Any

from torch import nn

from node.packed.tensor import PackedTensor

BY_EXPERT = "eager"
"""What ``transformers`` calls the forward of a mixture's own code: a loop over the experts that a
step uses."""


def run_packed_experts(layer: nn.Module) -> None:
    """Let mixtures with packed weights dequantise only the experts that a step uses."""
    for module in layer.modules():
        config: Any = getattr(module, "config", None)
        packed = (isinstance(w, PackedTensor) for w in module.parameters(recurse=False))
        if hasattr(config, "_experts_implementation") and any(packed):
            config._experts_implementation = BY_EXPERT
