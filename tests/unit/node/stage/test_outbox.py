"""Rows of one step that go to one peer share frames, as far as a frame holds them."""

from dht.messages import codec
from dht.messages.session import SESSION_BOUNDS, ActivationItem
from node.stage.pipeline import _Outbox

PEER = "12D3KooWexample"


def frames_of(row_bytes: int, features_bytes: int, count: int) -> list[tuple[list[str], int]]:
    """The sessions of each frame, and its body's bytes."""
    outbox = _Outbox()
    for number in range(count):
        item = ActivationItem(session=f"{number:04}", attempt=1, position=9, tokens=1)
        body, features = bytes(row_bytes), bytes(features_bytes)
        outbox.add_rows(PEER, item, body, prefill=False, features=features)
    return [
        ([item.session for item in message.items], len(body))
        for _, message, body, _ in outbox.frames("float32", 1)
        if not hasattr(message, "tokens")
    ]


def test_narrow_rows_share_a_frame_up_to_its_items() -> None:
    found = frames_of(64, 0, SESSION_BOUNDS.items_max + 1)
    assert [len(sessions) for sessions, _ in found] == [SESSION_BOUNDS.items_max, 1]


def test_wide_rows_of_many_sessions_are_cut_by_their_bytes() -> None:
    most = codec.FRAME_BOUNDS.chunk_bytes
    for row_bytes, features_bytes in ((most // 3, 0), (most // 6, most // 6)):
        found = frames_of(row_bytes, features_bytes, 8)
        assert all(size <= most for _, size in found)
        assert [len(sessions) for sessions, _ in found] == [3, 3, 2]
        assert [s for sessions, _ in found for s in sessions] == [f"{n:04}" for n in range(8)]


def test_a_row_that_is_wider_than_a_part_has_a_frame_of_its_own() -> None:
    found = frames_of(codec.FRAME_BOUNDS.chunk_bytes + 4, 0, 2)
    assert [len(sessions) for sessions, _ in found] == [1, 1]
