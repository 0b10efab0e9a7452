"""Of what strangers name, the newest stays."""

from dht.process.newest import Newest


def test_the_entries_set_last_stay_in_that_order() -> None:
    newest: Newest[str, int] = Newest(2)
    newest["a"] = 1
    newest["b"] = 2
    newest["a"] = 3
    newest["c"] = 4
    assert [*newest.items()] == [("a", 3), ("c", 4)]
