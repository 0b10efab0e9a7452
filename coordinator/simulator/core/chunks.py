"""How a prompt is cut: by the stages' own rule, with what profiles and links say. Pure.

Real stages learn their step times (:class:`coordinator.links.chunk_sizer.ChunkSizer`); here they
are known.
"""

from collections.abc import Sequence

from coordinator.links.chunk_sizer import ChunkSizer
from coordinator.simulator.core.event_loop import Stage, SwarmSimulation

MEASURED = 0
"""Instead of a number of tokens: chunks as the stages choose them."""
DECODES_TYPICAL = 16
"""In the steps that a chunk goes with."""
PREFILL_TYPICAL = 256
"""Tokens for which a row's time is looked up."""


def measured_chunks(
    engine: SwarmSimulation, tokens: int, stages: Sequence[Stage], others_decode: bool
) -> list[int]:
    """The chunks of a prompt of so many tokens that the first of ``stages`` would run."""
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
