"""Charts with axes, and the bars of peers: what is drawn where."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.health.drawing import (
    DRAWING,
    held_drawing,
    latency_drawing,
    nice_top,
    throughput_drawing,
)
from client.health.past import DAY, HOUR, SPANS, WEEK, Past, Span, past_json
from dht.process.json_file import Json

NOW_S = 1_800_000_000.0  # 08:00:00 UTC
MINUTE_S = int(NOW_S)


def asked(at: int, answered: int = 2, ttft_s: float | None = 0.2) -> Json:
    """Two requests in the minute ``at`` minutes ago."""
    return {
        "start_unix_s": MINUTE_S - 60 * at,
        "requests": 2,
        "answered": answered,
        "tokens": 8 * answered,
        "ttft_p50_s": ttft_s,
        "ttft_p95_s": ttft_s,
    }


def test_minutes_without_an_answer_are_gaps_in_the_line() -> None:
    steps = [asked(9), asked(8), asked(7, answered=0, ttft_s=None), asked(6, answered=1)]
    drawn = latency_drawing(past_json(Past(span=HOUR, probes=steps)), NOW_S)
    median = [line["points"].split() for line in drawn["lines"] if line["kind"] == "p50"]
    assert [len(points) for points in median] == [2, 2]
    assert len(set(median[1])) == 1, "one alone is a dot"
    assert median[0][0] == "50.5,0.0", "0.2 s is the top of the axis"
    assert [mark["x"] for mark in drawn["failed"]] == [52, 53]
    assert [mark["label"] for mark in drawn["marks"]] == ["0", "100", "200 ms"]
    assert latency_drawing(past_json(Past(span=HOUR)), NOW_S)["lines"] == []
    page_was_away = [asked(9), asked(5)]
    drawn = latency_drawing(past_json(Past(span=HOUR, probes=page_was_away)), NOW_S)
    assert sum(line["kind"] == "p50" for line in drawn["lines"]) == 2


def test_rates_are_drawn_against_a_round_axis() -> None:
    served = [
        {"start_unix_s": MINUTE_S - 60, "answers": 1, "tokens": 60 * 30},
        {"start_unix_s": MINUTE_S, "answers": 2, "tokens": 60 * 15},
        {"start_unix_s": MINUTE_S - 3600, "answers": 9, "tokens": 600},
    ]
    drawn = throughput_drawing(past_json(Past(span=HOUR, served=served)), NOW_S)
    assert [mark["label"] for mark in drawn["marks"]] == ["0", "25", "50"]
    assert [(bar["x"], bar["height"]) for bar in drawn["bars"]] == [(58, 60.0), (59, 30.0)]


@pytest.mark.parametrize(
    ("span", "labels"),
    [
        (HOUR, ["07:15", "07:30", "07:45", "08:00"]),
        (DAY, ["12:00", "18:00", "00:00", "06:00"]),
        (WEEK, ["Sat", "Sun", "Mon", "Tue", "Wed", "Thu", "Fri"]),
    ],
)
def test_times_stand_at_round_places(span: Span, labels: list[str]) -> None:
    drawn = throughput_drawing(past_json(Past(span=span)), NOW_S)
    assert [tick["label"] for tick in drawn["times"]] == labels
    assert all(0 <= tick["at"] <= 100 for tick in drawn["times"])


@given(most=st.floats(1e-6, 1e9))
def test_an_axis_ends_just_above_its_values(most: float) -> None:
    assert most <= nice_top(most) * (1 + 1e-9)
    assert nice_top(most) <= most * 2.5 * (1 + 1e-9)


@given(now_s=st.floats(1e9, 2e9))
def test_a_span_ends_with_the_step_of_now(now_s: float) -> None:
    for span in SPANS:
        begin_s = span.begin_unix_s(now_s)
        assert begin_s + span.span_s - span.step_s <= now_s < begin_s + span.span_s


def peer(number: int, start: int, end: int, state: str = "serving", *flags: str) -> Json:
    counts = state == "serving" and not flags
    return {
        "id": f"id{number}",
        "name": f"peer-{number}",
        "start": start,
        "end": end,
        "state": state,
        "flags": flags,
        "counts": counts,
    }


def test_peers_are_bars_over_their_layers() -> None:
    peers = [
        peer(0, 4, 8, "silent", "ghost"),
        peer(1, 0, 4),
        peer(2, 4, 8, "loading"),
        peer(3, 0, 8, "gone"),
        peer(4, 0, 0, "waiting"),
        peer(5, 0, 99),
    ]
    drawn = held_drawing(peers, 8)
    assert [(bar["label"], bar["x"], bar["width"], bar["kind"]) for bar in drawn["bars"]] == [
        ("peer-1", 0.0, 50.0, "answered"),
        ("peer-0", 50.0, 50.0, "lost"),
        ("peer-2", 50.0, 50.0, "waiting"),
    ]
    assert held_drawing([], 0)["bars"] == []


def test_many_peers_share_bars_and_the_most_shared_are_drawn() -> None:
    same = held_drawing([peer(n, n % 2, 8) for n in range(DRAWING.boxes_drawn_max + 2)], 8)
    assert [bar["label"] for bar in same["bars"]] == [
        f"{DRAWING.boxes_drawn_max // 2 + 1} peers"
    ] * 2
    every = held_drawing([peer(n, n, 100) for n in range(60)], 100)
    assert (len(every["bars"]), every["left_out"]) == (
        DRAWING.bars_drawn_max,
        60 - DRAWING.bars_drawn_max,
    )
