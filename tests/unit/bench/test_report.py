"""Tables of figures."""

from bench.report import table


def test_a_table_has_a_line_for_each_row_and_a_dash_for_what_is_not_known() -> None:
    rows = [{"name": "one", "wait_s": 0.0125, "load": {"p50": 0.5}}, {"name": "two", "load": None}]
    assert table(
        "| wait, ms: | load, 50%", "{name} | {wait_s:ms} | {load:}", rows
    ).splitlines() == [
        "| | wait, ms | load, 50% |",
        "|---|--:|---|",
        "| one | 12 | {'p50': 0.5} |",
        "| two | – | – |",
    ]
    assert "| 50% |" in table("load", "{load[p50]:.0%}", rows[:1])
