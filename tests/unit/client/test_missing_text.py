"""Which layers are missing, in words."""

from collections.abc import Sequence

import pytest

from client.errors import missing_text
from dht.messages.types import Assignment


@pytest.mark.parametrize(
    ("missing", "loading", "said"),
    [
        ([(0, 3), (7, 8)], [], "layers 0-2 and 7 are held by nobody that answers"),
        ([(3, 4)], [(0, 3), (4, 8)], "layer 3 is held by nobody that answers"),
        ([(3, 8)], [(3, 6), (5, 8), (0, 0)], "layers 3-7 are being loaded by 2 peers"),
        ([(3, 8)], [(0, 8), (4, 5), (9, 9)], "layers 3-7 are being loaded by 2 peers"),
        ([(7, 8)], [(0, 1000)], "layer 7 is being loaded by 1 peer"),
        (
            [(0, 2), (4, 8)],
            [(5, 6), (1, 5), (2, 4)],
            "layers 0 and 6-7 are held by nobody that answers;"
            " layers 1 and 4-5 are being loaded by 2 peers",
        ),
    ],
)
def test_what_is_loaded_is_told_apart(
    missing: Sequence[tuple[int, int]], loading: Sequence[tuple[int, int]], said: str
) -> None:
    spans = [
        Assignment(peer_id=f"p{number}", start=start, end=end)
        for number, (start, end) in enumerate(loading)
    ]
    assert missing_text(tuple(missing), spans, "answers") == said
