"""The WAN laboratory's stand-in serves whole answers through the real stages, in virtual time."""

import pytest

from bench.wan import POLICIES, Setting, floor, serve, summary


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cell_is_served_and_no_faster_than_physics(policy: str) -> None:
    setting = Setting(policy=policy, requests_per_s=0.5, seconds=8.0, seed=3)
    served = serve(setting)
    assert served
    found, least = summary([*served, *served]), floor(setting)
    assert found["tpot_mean_s"] >= least["tpot_s"] * 0.95
    assert found["ttft_mean_s"] >= least["ttft_s"] * (0.5 if policy.endswith("int8") else 0.95)
