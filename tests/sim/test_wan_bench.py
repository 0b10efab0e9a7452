"""The stand-in swarm that compares link policies still fits the stage's own interfaces."""

import pytest

from bench.papers.links import POLICIES
from testing.stand_in import Setting, floor, requests, serve


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_answers_all_requests_no_faster_than_the_floor(policy: str) -> None:
    setting = Setting(policy=policy, requests_per_s=0.5, seconds=4.0, seed=3)
    served = serve(setting)
    assert len(served) == len(requests(setting)) > 0
    least_s = floor(setting)["tpot_s"]
    assert all(answer.tpot_s >= 0.95 * least_s for answer in served)
