"""Connections of light peers that die; each case in a process of its own, without the daemon."""

import pytest

from tests.e2e.light import needs_libp2p, run_light

pytestmark = [pytest.mark.e2e, needs_libp2p]
CASES = (
    "one_that_rests",
    "one_with_more_to_send",
    "one_that_refuses_a_protocol",
    "one_that_nobody_uses",
)


@pytest.mark.parametrize("case", CASES)
def test_a_connection_that_dies_is_replaced_and_one_that_lives_is_kept(case: str) -> None:
    run_light(["tests.e2e.light_broken", case])
