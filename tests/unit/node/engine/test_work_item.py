"""What a step's items say of the time that their rows took before."""

import torch

from dht.messages.session import Sampling
from node.engine.work_item import WorkItem

ROW = torch.zeros(1, 4)


def test_rows_at_the_last_stage_say_what_they_took_at_those_before() -> None:
    last = WorkItem(
        session="s",
        start=2,
        end=4,
        position=9,
        hidden=ROW,
        sampling=Sampling(),
        computed_s=0.3,
        waited_s=0.1,
    )
    assert last.ring_s == (0.3, 0.1)


def test_rows_elsewhere_and_at_a_ring_of_one_stage_say_nothing() -> None:
    middle = WorkItem(session="s", start=1, end=2, position=9, hidden=ROW, computed_s=0.3)
    alone = WorkItem(session="s", start=0, end=4, position=9, token_ids=(1,), sampling=Sampling())
    assert middle.ring_s is None
    assert alone.ring_s is None
