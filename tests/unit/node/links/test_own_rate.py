"""An uplink's rate is known only from links that were seen to share it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.links.own_rate import LinkSeen, OwnRate, RateConfig

CONFIG = RateConfig()


class Links:
    """A machine's links, window by window: what each carried, and whether it was the limit."""

    def __init__(self) -> None:
        self.own = OwnRate()
        self.now_s = 0.0
        self.seen: dict[str, LinkSeen] = {}
        self.own.look({}, self.now_s)

    def window(self, **bytes_per_s: tuple[float, bool]) -> float | None:
        took_s = 2 * CONFIG.window_s
        for name in bytes_per_s:
            self.seen.setdefault(name, LinkSeen(delivered_bytes=0, busy_us=0))
        self.own.look(self.seen, self.now_s)
        self.now_s += took_s
        for name, (rate, busy) in bytes_per_s.items():
            before = self.seen[name]
            self.seen[name] = LinkSeen(
                delivered_bytes=before.delivered_bytes + round(rate * took_s),
                busy_us=before.busy_us + (round(took_s * 1e6) if busy else 0),
            )
        self.own.look(self.seen, self.now_s)
        return self.own.bytes_per_s


def started(*names: str) -> Links:
    """Links that were all open for a window in which nothing was sent."""
    links = Links()
    links.window(**dict.fromkeys(names, (0.0, False)))
    return links


def test_links_that_share_an_uplink_tell_its_rate() -> None:
    links = started("a", "b")
    assert links.window(a=(1e6, True), b=(0.0, False)) is None
    assert links.window(a=(0.0, False), b=(1e6, True)) is None
    assert links.window(a=(0.6e6, True), b=(0.5e6, True)) == pytest.approx(1.1e6)


@pytest.mark.parametrize(
    "together",
    [
        {"a": (1e6, True), "b": (1e6, True)},
        {"a": (0.6e6, True), "b": (0.5e6, False)},
        {"a": (0.6e6, False), "b": (0.5e6, False)},
        {"a": (0.6e6, True), "b": (0.5e6, True), "new": (0.1e6, True)},
    ],
    ids=["as fast as alone", "one had no more to send", "none had", "one was never seen alone"],
)
def test_else_it_is_not_known(together: dict[str, tuple[float, bool]]) -> None:
    links = started("a", "b", "new")
    links.window(a=(1e6, True), b=(0.0, False), new=(0.0, False))
    links.window(a=(0.0, False), b=(1e6, True), new=(0.0, False))
    assert links.window(**together) is None


def test_readers_that_slow_down_together_do_not_talk_an_uplink_down() -> None:
    links = started("a", "b", "honest")
    links.window(honest=(3e6, True))
    links.window(a=(1e6, True))
    links.window(b=(1e6, True))
    for _ in range(20):
        assert links.window(a=(10.0, True), b=(10.0, True)) == pytest.approx(3e6)


def test_what_carries_more_than_it_can_is_not_known_again() -> None:
    links = started("a", "b")
    links.window(a=(1e6, True))
    links.window(b=(1e6, True))
    assert links.window(a=(0.6e6, True), b=(0.5e6, True)) is not None
    assert links.window(a=(1e6, True), b=(1e6, True)) is None


def test_a_stream_that_began_anew_counts_from_its_next_window() -> None:
    links = started("a", "b")
    links.window(a=(1e6, True))
    links.window(b=(1e6, True))
    links.seen["a"] = LinkSeen(delivered_bytes=0, busy_us=0)
    links.now_s += 2 * CONFIG.window_s
    links.own.look(links.seen, links.now_s)
    assert links.own.bytes_per_s is None
    assert links.window(a=(0.6e6, True), b=(0.5e6, True)) == pytest.approx(1.1e6)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from("abcd"), st.tuples(st.floats(0, 1e9), st.booleans()), max_size=4
        ),
        max_size=30,
    )
)
def test_it_is_no_less_than_any_link_alone_and_told_seldom(windows) -> None:  # type: ignore[no-untyped-def]
    links = started(*"abcd")
    before = None
    for window in windows:
        found = links.window(**window)
        busy = [rate for rate, is_busy in window.values() if is_busy]
        if found is not None and len(busy) == 1:
            assert found * CONFIG.told_apart >= busy[0] * (1 - 1e-6)
        if found is not None and before is not None and found != before:
            assert max(found, before) > CONFIG.told_apart * min(found, before)
        before = found
        assert len(links.own._alone) <= CONFIG.links_kept
