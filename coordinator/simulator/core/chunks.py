"""Cuts a simulated prompt into chunks by the stages' own rule. Pure.

Real stages learn their step times (:class:`coordinator.links.chunk_sizer.ChunkSizer`); here the
times are known from profiles and links.
"""

from collections.abc import Sequence

from coordinator.links.chunk_sizer import ChunkSizer
from coordinator.simulator.core.event_loop import Stage, SwarmSimulation

MEASURED = 0
"""Value of ``chunk_tokens`` for chunks as the stages choose them."""
DECODES_TYPICAL = 16
"""Assumed decodes in the steps that run a chunk."""
PREFILL_TYPICAL = 256
"""Tokens at which a row's prefill time is taken."""


def measured_chunks(
    engine: SwarmSimulation, tokens: int, stages: Sequence[Stage], others_decode: bool
) -> list[int]:
    """The chunks in which the first of ``stages`` would run a prompt of ``tokens`` tokens."""
    name, start, end = stages[0]
    peer = engine.peers[name]
    sizer = ChunkSizer(
        fixed_s=(end - start) * peer.decode_time(DECODES_TYPICAL),
        row_s=(end - start) * peer.prefill_time(PREFILL_TYPICAL) / PREFILL_TYPICAL,
    )
    link_row_s = engine.link(name, stages[1][0]).token_s if len(stages) > 1 else None
    sizes = []
    while tokens > 0:
        chunk = sizer.choose(
            tokens, len(stages), link_row_s=link_row_s, others_decode=others_decode
        )
        sizes.append(min(chunk, tokens))
        tokens -= sizes[-1]
    return sizes
