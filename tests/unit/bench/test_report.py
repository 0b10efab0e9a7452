"""Tables of figures."""

from bench.report import flat, look, of, table


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


def test_cells_reach_into_lists_and_say_truths_and_names() -> None:
    row = {"by": {"1": [0.5, 2]}, "same": False, "name": "a_name"}
    assert table("a | b", "{by[1][1]} {by[1][7]:.1f} | {same:yes} {name:words}", [row]).endswith(
        "| 2 – | no a name |"
    )


def test_mappings_within_mappings_become_rows() -> None:
    nested = {"one": {"note": "", "a": {"x": 1}, "b": {"x": 2}}, "of": 3}
    assert flat(nested, "model", "text") == [
        {"model": "one", "text": "a", "x": 1},
        {"model": "one", "text": "b", "x": 2},
    ]
    assert look(nested, "one[b][x]") == 2
    assert of(nested, "one[b][x]", "of") == 2 / 3
    assert of(nested, "one[c][x]", "of") is None
