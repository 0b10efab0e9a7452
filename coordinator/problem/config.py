"""Numbers that a planner assumes where peers have announced or measured nothing. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemConfig:
    """What planners assume of peers and links, and the bounds that announced figures count with."""

    decodes_measured: float = 16.0
    """Assumed batch at which a peer's T_j was measured, in tokens."""
    decode_fixed: float = 0.5
    """Assumed fixed share of a step at that batch: weights are read once per batch."""
    prompt_token: float = 0.25
    """Assumed ratio of a prompt token's time to a decoded token's: a prompt reads the weights
    once."""
    context_typical: float = 256.0
    """Context at which peers measure their T_j, and announced times are compared with it."""
    unlimited_layer_tokens: float = 1e15
    stretch_max: float = 1e6
    slow_max: float = 1000.0
    """Maximum ratio of an announced time per row to that of the fullest batch: a peer that
    announces high rates with endless times would get layers by the rates and stop all plans by the
    times."""
    link_bytes_per_s_min: float = 1000.0
    """Bandwidth that a slower link counts with: no plan can use less, and solvers fail on ratios of
    1e300, which the wire allows."""
    tokens_per_s_min: float = 1e-2
    """Rate that a slower peer counts with, for the same reason."""
    guessed_peers_max: int = 128
    """Maximum peers whose missing links are guessed: their number grows with the square."""
    witnesses: int = 2
    """Minimum number of witnesses that must allow a guess at least as good: common neighbours, one
    of which alone may lie about its links, and the way back."""
    alike_within: float = 0.25
    """Share by which a figure may differ: measurements of the same link and device do."""


ASSUMED = ProblemConfig()
