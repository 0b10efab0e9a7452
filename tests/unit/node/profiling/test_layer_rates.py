"""A peer's tokens/s by the layers that it holds, from any measured times."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from node.profiling.layer_fit import LayerFit, Line
from node.profiling.layer_rates import BATCHES, best_rate


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=len(BATCHES)))
def test_rates_fall_with_layers_whatever_was_measured(seconds: list[float]) -> None:
    lines = [
        Line(batch=batch, base_s=s, token_s=1e-6)
        for batch, s in zip(BATCHES, seconds, strict=False)
    ]
    for sessions in (1, 4, 1000):
        rates = [best_rate(LayerFit(tuple(lines)), n, sessions, 256) for n in range(1, 20)]
        assert all(a > b > 0 for a, b in itertools.pairwise(rates))
