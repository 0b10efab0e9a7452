"""A head drafts as many tokens as have a fair chance, and one at least."""

from node.drafting.config import DRAFTING
from node.drafting.head_pace import HeadPace


def test_it_drafts_more_where_it_is_right_and_one_where_it_is_not() -> None:
    pace = HeadPace()
    begun = pace.count
    assert 1 < begun < DRAFTING.head_drafts_max
    for right, count in (
        (True, DRAFTING.head_drafts_max),
        (False, 1),
        (True, DRAFTING.head_drafts_max),
    ):
        for _ in range(40):
            pace.told((7, 8, 9))
            pace.came((7, 8, 9) if right else (6, 8, 9))
        assert pace.count == count


def test_only_what_was_told_last_is_compared() -> None:
    pace = HeadPace()
    pace.told((7,))
    pace.told(())
    before = pace.right
    pace.came((6,))
    assert pace.right == before
    pace.told((7, 8))
    pace.came((7,))  # the round ended there
    assert pace.right > before
