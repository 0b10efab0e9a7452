"""Products of this CPU by dtype."""

import torch

from node.device.products import multiplies


def test_float32_is_no_quicker_than_itself_and_the_choice_stays() -> None:
    multiplies.cache_clear()
    assert not multiplies(torch.float32)
    assert multiplies(torch.bfloat16) is multiplies(torch.bfloat16)
    assert multiplies.cache_info().misses == 2
