"""Which of a model's weights are one and the same under several names."""

from torch import nn


def tied_to(model: nn.Module, name: str) -> tuple[str, ...]:
    """Names of all weights that the model's code ties to the weight ``name``, and itself; none for
    one that it does not tie."""
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    source = ties.get(name, name)
    targets = tuple(target for target, its in ties.items() if its == source)
    return (source, *targets) if targets else ()


def ties(model: nn.Module, name: str) -> bool:
    """Whether the model's code fills the weight ``name`` from another weight."""
    return name in (getattr(model, "all_tied_weights_keys", None) or {})
