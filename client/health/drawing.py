"""Where the lines of the page's drawings go; the template writes them as SVG. Pure."""

from collections.abc import Mapping, Sequence, Set
from itertools import groupby
from typing import Any

from client.pages.clean import peer_name
from dht.messages.types import SINK, SOURCE

Json = dict[str, Any]
WIDTH = 640
BOX_WIDTH, BOX_HEIGHT, ROW, COLUMN = 104, 34, 46, 176
EDGES_DRAWN_MAX = 300
EDGES_LABELLED_MAX = 10
BOXES_DRAWN_MAX = 24
"""With more peers than this, those with the same layers share a box."""
COLUMNS_DRAWN_MAX = 32
ROWS_DRAWN_MAX = 24
BUSY, FULL = 0.6, 0.9
"""Shares of a capacity from which a plan's edge or peer is drawn as busy, as full. Full is no
fault: a plan of maximum flow fills its bottleneck, whether anybody asks now or not."""
CHART_HEIGHT = 110


def flow_drawing(plan: Json | None, names: Mapping[str, str], here: Set[str]) -> Json | None:
    """Boxes and lines of the plan's flow: peers by their first layer, left to right. A box none of
    whose peers is ``here`` is marked."""
    if plan is None or not plan["edges"]:
        return None
    groups = _groups(plan["assignments"])
    starts = sorted({key[0] for key in groups})[:COLUMNS_DRAWN_MAX]
    columns = {start: at for at, start in enumerate(starts)}
    rows: dict[int, int] = dict.fromkeys(starts, 0)
    boxes, member_of = [], {SOURCE: SOURCE, SINK: SINK}
    places: dict[str, tuple[float, float]] = {}
    for key, members in sorted(groups.items()):
        start = key[0]
        if start not in columns or rows[start] >= ROWS_DRAWN_MAX:
            continue
        x, y = COLUMN * (columns[start] + 1), 30 + ROW * rows[start]
        rows[start] += 1
        name = f"{key}"
        places[name] = (x, y)
        member_of.update(dict.fromkeys((each["id"] for each in members), name))
        boxes.append(_box(members, x, y, names, here))
    height = 60 + ROW * (max(rows.values(), default=1) - 1)
    _centre(boxes, places, rows, columns, height)
    width = COLUMN * (len(starts) + 1)
    places[SOURCE], places[SINK] = (26, height / 2), (width - 26, height / 2)
    ends = [{"x": x, "y": y, "label": label} for (x, y), label in
            ((places[SOURCE], "prompts"), (places[SINK], "tokens"))]  # fmt: skip
    lines = _lines(plan["edges"], member_of, places)
    return {
        "boxes": boxes,
        "ends": ends,
        "lines": lines,
        "width": width,
        "height": height,
        "away": sum(each["id"] not in here for each in plan["assignments"]),
    }


def _groups(assignments: Sequence[Json]) -> dict[tuple[int, int, str], list[Json]]:
    together = len(assignments) > BOXES_DRAWN_MAX
    groups: dict[tuple[int, int, str], list[Json]] = {}
    for each in assignments:
        key = (each["start"], each["end"], "" if together else each["id"])
        groups.setdefault(key, []).append(each)
    return groups


def _box(members: list[Json], x: float, y: float, names: Mapping[str, str], here: Set[str]) -> Json:
    first = members[0]
    flow = sum(each["tokens_per_s"] for each in members)
    known = [each["capacity_tokens_per_s"] for each in members]
    capacity = sum(known) if None not in known else None
    use = flow / capacity if capacity else None
    label = names.get(first["id"]) or peer_name("", first["id"]) if len(members) == 1 else None
    label = label or f"{len(members)} peers"
    of = f" of {capacity:.0f}" if capacity else ""
    absent = sum(each["id"] not in here for each in members)
    state = f", {absent} not answering" if absent else ""
    return {
        "x": x,
        "y": y,
        "label": label if len(label) <= 15 else f"{label[:14]}…",
        "layers": f"layers {first['start']}–{first['end'] - 1}",
        "bar": BOX_WIDTH * min(1.0, use or 0.0),
        "kind": use_kind(use),
        "away": absent == len(members),
        "text": f"{label}: {flow:.1f}{of} tokens/s{state}",
    }


def _centre(
    boxes: list[Json],
    places: dict[str, tuple[float, float]],
    rows: Mapping[int, int],
    columns: Mapping[int, int],
    height: float,
) -> None:
    """Move each column's boxes to the middle of the drawing."""
    start_at = {COLUMN * (at + 1): start for start, at in columns.items()}
    shifts = {
        COLUMN * (at + 1): (height - 60 - ROW * (rows[start_at[COLUMN * (at + 1)]] - 1)) / 2
        for at in columns.values()
    }
    for box in boxes:
        box["y"] += shifts[box["x"]]
    for name, (x, y) in places.items():
        places[name] = (x, y + shifts[int(x)])


def _lines(
    edges: Sequence[Json], member_of: Mapping[str, str], places: Mapping[str, tuple[float, float]]
) -> list[Json]:
    """One curve for all edges between two boxes, the largest flows first."""
    between: dict[tuple[str, str], list[Json]] = {}
    for edge in edges:
        tail, head = member_of.get(edge["from"]), member_of.get(edge["to"])
        if tail is not None and head is not None and edge["tokens_per_s"] > 0:
            between.setdefault((tail, head), []).append(edge)
    flows = {pair: sum(e["tokens_per_s"] for e in each) for pair, each in between.items()}
    most = max(flows.values(), default=1.0)
    lines = []
    for pair in sorted(flows, key=lambda each: -flows[each])[:EDGES_DRAWN_MAX]:
        (x1, y1), (x2, y2) = places[pair[0]], places[pair[1]]
        x1 += 30 if pair[0] == SOURCE else BOX_WIDTH / 2
        x2 -= 30 if pair[1] == SINK else BOX_WIDTH / 2
        used = [e["use"] for e in between[pair] if e["use"] is not None]
        use = max(used, default=None)
        percent = f", link used {100 * use:.0f}%" if use is not None else ""
        short = f" · {100 * use:.0f}%" if use is not None and use >= 0.01 else ""
        lines.append(
            {
                "path": f"M{x1:.1f} {y1:.1f} C{(x1 + x2) / 2:.1f} {y1:.1f}"
                f" {(x1 + x2) / 2:.1f} {y2:.1f} {x2:.1f} {y2:.1f}",
                "width": 1 + 5 * flows[pair] / most,
                "kind": use_kind(use),
                "text": f"{flows[pair]:.1f} tokens/s{percent}",
                "x": (x1 + x2) / 2,
                "y": (y1 + y2) / 2 - 4,
                "label": f"{flows[pair]:.0f}/s{short}",
            }
        )
    if len(lines) > EDGES_LABELLED_MAX:
        for line in lines:
            line["label"] = ""
    return lines


def use_kind(use: float | None) -> str:
    """The colour class of a share of a capacity."""
    if use is None:
        return "unknown"
    return "full" if use >= FULL else "busy" if use >= BUSY else "calm"


def coverage_drawing(layers: Json) -> list[Json]:
    """One bar per layer: height by holders, colour class by how many."""
    holders = [len(each) for each in layers["holders"]]
    most, count = max([*holders, 2]), max(1, len(holders))
    step = WIDTH / count
    kinds = ("lost", "single", "good")
    return [
        {
            "x": step * layer,
            "width": max(0.5, step - min(3.0, step / 5)),
            # A lost layer is a full-height gap: the eye must not miss it.
            "height": 80.0 if depth == 0 else 6 + 74 * depth / most,
            "kind": kinds[min(depth, 2)],
            "layer": layer,
            "holders": depth,
        }
        for layer, depth in enumerate(holders)
    ]


def sparkline(series: list[Json]) -> Json:
    """TTFT of the last hour's probes; those that failed are gaps, marked at the bottom."""
    top = max((each["ttft_s"] for each in series), default=0.0) or 1.0
    step = WIDTH / max(1, len(series) - 1)
    lines = []
    for ok, run in groupby(enumerate(series), key=lambda item: item[1]["ok"]):
        if ok:
            points = [f"{step * at:.1f},{56 - 50 * each['ttft_s'] / top:.1f}" for at, each in run]
            # One alone is drawn as a dot, which is a line to itself with round ends.
            lines.append(" ".join(points if len(points) > 1 else points * 2))
    failed = [step * at for at, each in enumerate(series) if not each["ok"]]
    return {"lines": lines, "failed": failed, "top": top}


def history_drawing(hours: Sequence[Mapping[str, float]], now_unix_s: float, span: int) -> Json:
    """Bars of requests per hour, answered below and failed on top, over the last ``span`` hours."""
    bars = [
        (
            each["start_unix_s"],
            each["answered"],
            each["requests"] - each["answered"],
            f"{each['answered']:.0f} of {each['requests']:.0f} answered,"
            f" {each['tokens']:.0f} tokens",
        )
        for each in hours
    ]
    total = {key: sum(each[key] for each in hours) for key in ("requests", "answered", "tokens")}
    return {**_chart(bars, now_unix_s, span), **total}


def served_drawing(hours: Sequence[Mapping[str, float]], now_unix_s: float, span: int) -> Json:
    """Bars of the swarm's tokens per hour over the last ``span`` hours."""
    bars = [
        (
            each["start_unix_s"],
            each["tokens"],
            0.0,
            f"{each['tokens']:.0f} tokens, {each['answers']:.0f} answers",
        )
        for each in hours
    ]
    total = {key: sum(each[key] for each in hours) for key in ("answers", "tokens")}
    return {**_chart(bars, now_unix_s, span), **total}


def _chart(bars: Sequence[tuple[float, float, float, str]], now_unix_s: float, span: int) -> Json:
    """Bars of (hour's start, good, bad, words), the tallest as high as the chart."""
    most = max((good + bad for _, good, bad, _ in bars), default=0.0)
    step = WIDTH / span
    drawn = []
    for start_unix_s, good, bad, text in bars:
        at = span - 1 - (now_unix_s // 3600 - start_unix_s // 3600)
        if not 0 <= at < span or most <= 0:
            continue
        drawn.append(
            {
                "x": step * at,
                "width": max(1.0, step - 1),
                "good": CHART_HEIGHT * good / most,
                "bad": CHART_HEIGHT * bad / most,
                "hours_ago": span - 1 - at,
                "text": text,
            }
        )
    return {"bars": drawn, "most": most, "height": CHART_HEIGHT, "days": span // 24}
