"""What strangers make a light peer hold; each case in a process of its own, without the daemon."""

import pytest

from tests.e2e.light import needs_libp2p, run_light

pytestmark = [pytest.mark.e2e, needs_libp2p]
CASES = (
    "a_first_line_without_end",
    "a_first_line_that_is_no_text",
    "plain_text",
    "beyond_its_window",
    "many_streams_unread",
    "what_has_ended_holds_nothing",
    "who_reads_nothing",
    "the_budget_alone",
    "silent_connections",
    "connections_that_come_and_go",
    "what_is_pushed",
    "whatever_comes",
)


@pytest.mark.parametrize("case", CASES)
def test_a_stranger_takes_a_bounded_part_of_a_light_peer(case: str) -> None:
    run_light(["tests.e2e.light_bounds", case])
