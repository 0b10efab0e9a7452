"""What the measured times of one layer say: a peer's tokens/s by the layers held (T_j). Pure.

The times are those of :mod:`node.profiling.layer_profile`, or of a data sheet
(:mod:`node.profiling.data_sheets`).
"""

from dataclasses import dataclass

from coordinator.evaluation.one_answer import STEP_S
from coordinator.policies.batching.scheduler import BATCHING
from coordinator.problem.config import ASSUMED
from dht.messages.types import LayerTimes, ModelSpec, mean_layer_bytes
from node.profiling.layer_fit import LayerFit, Timing, announced, fit

SESSION_TOKENS = round(2 * ASSUMED.context_typical)
"""Typical length of a session, which bounds the batch by KV room."""
BATCHES = (1, 4, 16, 32, 64, 96, 128, 192, 256)
CONTEXTS = (1, 512, 2048)
CHUNKS = (32, 128, 256, BATCHING.prefill_tokens_most)
"""Timed chunks of a prompt, in tokens; no step runs a longer one."""
CHUNK_CONTEXTS = (0, 1024)
"""Tokens of the prompt before a timed chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured times of one layer."""

    points: tuple[Timing, ...]
    """Times of decode rows, by batch and context."""
    checks: tuple[Timing, ...]
    """Times of decode rows that are left out of the fit."""
    prefills: tuple[Timing, ...]
    """Times of a prompt's chunks of ``batch`` tokens, with ``context_tokens`` before them."""
    kv_tokens: int
    """KV room at the measurement: with more, more points can be timed."""

    @property
    def fit(self) -> LayerFit:
        """Fit of the layer's time between the points."""
        return fit(self.points)

    @property
    def fit_error(self) -> float | None:
        """Largest relative error at the points left out of the fit; None without any."""
        return max(self.fit.errors(self.checks), default=None)

    @property
    def prompt_fit(self) -> LayerFit:
        """Fit of a prompt's chunks, by tokens and context."""
        return fit(self.prefills)

    @property
    def decode_times(self) -> LayerTimes:
        """Decode times to announce: a layer's, by batch and context."""
        return announced(self.fit)

    @property
    def prompt_times(self) -> LayerTimes:
        """Prompt times to announce: a layer's, by a chunk's tokens."""
        return announced(self.prompt_fit) if self.prefills else ()

    def decode_s(self) -> dict[int, float]:
        """Seconds of one layer by decodes, at a typical context."""
        return {
            batch: self.fit.seconds(batch, ASSUMED.context_typical)
            for batch in sorted({timing.batch for timing in self.points})
        }

    def layer_s(self) -> dict[int, float]:
        """Seconds of one layer by rows, at a typical context; they bound a step's rows."""
        decodes = self.decode_s()
        if not self.prefills:
            return decodes
        chunks = {line.batch: line.seconds(0) for line in self.prompt_fit.lines}
        return {**{rows: s for rows, s in decodes.items() if rows < min(chunks)}, **chunks}


def rates(
    profile: Profile, spec: ModelSpec, memory_bytes: int, layers_max: int
) -> tuple[float, ...]:
    """T_j for j = 1 to ``layers_max`` of a peer with this memory, at a typical context."""
    layer = profile.fit
    return tuple(
        best_rate(layer, layers, _sessions(spec, memory_bytes, layers), ASSUMED.context_typical)
        for layers in range(1, layers_max + 1)
    )


def _sessions(spec: ModelSpec, memory_bytes: int, layers: int) -> int:
    """Number of typical sessions that fit in memory beside ``layers`` layers; at least one."""
    free = memory_bytes - layers * mean_layer_bytes(spec)
    tokens = int(max(0.0, free)) // (spec.kv_bytes_per_token_layer * layers)
    return max(1, tokens // SESSION_TOKENS)


def best_rate(layer: LayerFit, layers: int, sessions: int, context_tokens: float) -> float:
    """Maximum tokens/s over batches b of up to ``sessions``: b / (overhead + layers × t(b)).

    Only batches up to the largest measured one count.
    """
    return max(
        rate(layer, layers, batch, context_tokens)
        for batch in range(1, min(sessions, layer.batch_max) + 1)
    )


def rate(layer: LayerFit, layers: int, batch: int, context_tokens: float) -> float:
    """Tokens/s of a peer with ``layers`` layers that decodes ``batch`` sessions at a time."""
    return batch / (STEP_S + layers * layer.seconds(batch, context_tokens))
