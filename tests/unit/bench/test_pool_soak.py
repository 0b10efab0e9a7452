"""Many sessions leave an engine as it was."""

from pathlib import Path

import pytest

from bench.gpu.pool_soak import LAYERS, VOCAB, soak
from testing.random_model import make_llama

GROWN_BYTES_MAX = 10 << 20


@pytest.mark.slow
@pytest.mark.parametrize("keep_prefixes", [False, True])
def test_short_sessions_leave_no_page_and_no_memory_behind(
    tmp_path: Path, keep_prefixes: bool
) -> None:
    directory = make_llama(tmp_path, hidden=64, layers=LAYERS, vocab=VOCAB)
    soaked = soak(directory, 1000, keep_prefixes=keep_prefixes)
    assert soaked.sessions == 1000
    assert soaked.refused > 0
    assert soaked.cancelled > 0
    assert soaked.free_tokens_after == soaked.free_tokens_before
    assert soaked.grown_bytes <= GROWN_BYTES_MAX
