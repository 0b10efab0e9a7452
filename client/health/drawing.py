"""Where the lines of the page's drawings go; the template writes them as SVG. Pure."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby

from client.health.past import span_from_json
from client.pages.clean import peer_name
from dht.messages.types import SINK, SOURCE
from dht.process.json_file import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingConfig:
    """Sizes in units of the drawing, and how much is drawn at most."""

    width: int = 640
    box_width: int = 104
    box_height: int = 34
    row: int = 52
    column: int = 190
    label_height: float = 13.0
    char_width: float = 6.6
    """Height of a line's label and width of its widest usual character, in units of the drawing."""
    edges_drawn_max: int = 300
    edges_labelled_max: int = 10
    boxes_drawn_max: int = 24
    """With more peers than this, those with the same layers share a box."""
    columns_drawn_max: int = 32
    rows_drawn_max: int = 24
    busy: float = 0.6
    full: float = 0.9
    """Shares of a capacity from which a plan's edge or peer is drawn as ``busy``, as ``full``. Full
    is no fault: a plan of maximum flow fills its bottleneck, whether anybody asks now or not."""
    bars_drawn_max: int = 24
    ticks_max: int = 8


DRAWING = DrawingConfig()


LABEL_AT = (0.35, 0.5, 0.65, 0.2, 0.8)
"""Places along a line at which its label is tried."""
TICKS_S = (900, 21_600, 86_400)
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def flow_drawing(plan: Json | None, names: Mapping[str, str], here: Set[str]) -> Json | None:
    """Boxes and lines of the plan's flow: peers by their first layer, left to right. A box none of
    whose peers is ``here`` is marked."""
    if plan is None or not plan["edges"]:
        return None
    groups = _groups(plan["assignments"])
    starts = sorted({key[0] for key in groups})[: DRAWING.columns_drawn_max]
    columns = {start: at for at, start in enumerate(starts)}
    rows: dict[int, int] = dict.fromkeys(starts, 0)
    boxes, member_of = [], {SOURCE: SOURCE, SINK: SINK}
    places: dict[str, tuple[float, float]] = {}
    for key, members in sorted(groups.items()):
        start = key[0]
        if start not in columns or rows[start] >= DRAWING.rows_drawn_max:
            continue
        x, y = DRAWING.column * (columns[start] + 1), 30 + DRAWING.row * rows[start]
        rows[start] += 1
        name = f"{key}"
        places[name] = (x, y)
        member_of.update(dict.fromkeys((each["id"] for each in members), name))
        boxes.append(_box(members, x, y, names, here))
    height = 60 + DRAWING.row * (max(rows.values(), default=1) - 1)
    _centre(boxes, places, rows, columns, height)
    width = DRAWING.column * (len(starts) + 1)
    places[SOURCE], places[SINK] = (26, height / 2), (width - 26, height / 2)
    ends = [{"x": x, "y": y, "label": label} for (x, y), label in
            ((places[SOURCE], "prompts"), (places[SINK], "tokens"))]  # fmt: skip
    taken = [_around(each["x"], each["y"], DRAWING.box_width, DRAWING.box_height) for each in boxes]
    taken += [_around(x, y, 52, DRAWING.label_height) for x, y in (places[SOURCE], places[SINK])]
    lines = _lines(plan["edges"], member_of, places, taken)
    return {
        "boxes": boxes,
        "ends": ends,
        "lines": lines,
        "width": width,
        "height": height,
        "away": sum(each["id"] not in here for each in plan["assignments"]),
    }


def _groups(assignments: Sequence[Json]) -> dict[tuple[int, int, str], list[Json]]:
    together = len(assignments) > DRAWING.boxes_drawn_max
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
        "label": _short(label),
        "layers": f"layers {first['start']}–{first['end'] - 1}",
        "bar": DRAWING.box_width * min(1.0, use or 0.0),
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
    shifts = {
        DRAWING.column * (at + 1): (height - 60 - DRAWING.row * (rows[start] - 1)) / 2
        for start, at in columns.items()
    }
    for box in boxes:
        box["y"] += shifts[box["x"]]
    for name, (x, y) in places.items():
        places[name] = (x, y + shifts[int(x)])


def _lines(
    edges: Sequence[Json],
    member_of: Mapping[str, str],
    places: Mapping[str, tuple[float, float]],
    taken: list[Box],
) -> list[Json]:
    """One curve for all edges between two boxes, the largest flows first; few have labels, which
    stand where nothing is ``taken``."""
    between: dict[tuple[str, str], list[Json]] = {}
    for edge in edges:
        tail, head = member_of.get(edge["from"]), member_of.get(edge["to"])
        if tail is not None and head is not None and edge["tokens_per_s"] > 0:
            between.setdefault((tail, head), []).append(edge)
    flows = {pair: sum(e["tokens_per_s"] for e in each) for pair, each in between.items()}
    most = max(flows.values(), default=1.0)
    shown = sorted(flows, key=lambda each: -flows[each])[: DRAWING.edges_drawn_max]
    lines = []
    for pair in shown:
        (x1, y1), (x2, y2) = places[pair[0]], places[pair[1]]
        x1 += 30 if pair[0] == SOURCE else DRAWING.box_width / 2
        x2 -= 30 if pair[1] == SINK else DRAWING.box_width / 2
        used = [e["use"] for e in between[pair] if e["use"] is not None]
        use = max(used, default=None)
        percent = f", link used {100 * use:.0f}%" if use is not None else ""
        short = f" · {100 * use:.0f}%" if use is not None and use >= 0.01 else ""
        line = {
            "path": f"M{x1:.1f} {y1:.1f} C{(x1 + x2) / 2:.1f} {y1:.1f}"
            f" {(x1 + x2) / 2:.1f} {y2:.1f} {x2:.1f} {y2:.1f}",
            "width": 1 + 5 * flows[pair] / most,
            "kind": use_kind(use),
            "text": f"{flows[pair]:.1f} tokens/s{percent}",
            "label": "",
        }
        label = f"{flows[pair]:.0f}/s{short}"
        width = DRAWING.char_width * len(label)
        if len(shown) <= DRAWING.edges_labelled_max and (
            place := _free_place((x1, y1), (x2, y2), width, taken)
        ):
            taken.append(_around(*place, width, DRAWING.label_height))
            line |= {"label": label, "x": place[0], "y": place[1] + DRAWING.label_height / 4}
        lines.append(line)
    return lines


def _free_place(
    tail: tuple[float, float], head: tuple[float, float], width: float, taken: Sequence[Box]
) -> tuple[float, float] | None:
    """The middle of a label above the curve from ``tail`` to ``head``, where there is room."""
    for t in LABEL_AT:
        along, across = 1.5 * t * (1 - t) + t**3, 3 * t**2 - 2 * t**3
        x = tail[0] + (head[0] - tail[0]) * along
        y = tail[1] + (head[1] - tail[1]) * across - 7
        left, top, right, bottom = _around(x, y, width, DRAWING.label_height)
        if not any(
            left < other[2] and right > other[0] and top < other[3] and bottom > other[1]
            for other in taken
        ):
            return x, y
    return None


def _around(x: float, y: float, width: float, height: float) -> Box:
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def use_kind(use: float | None) -> str:
    """The colour class of a share of a capacity."""
    if use is None:
        return "unknown"
    return "full" if use >= DRAWING.full else "busy" if use >= DRAWING.busy else "calm"


def coverage_drawing(layers: Json) -> list[Json]:
    """One bar per layer: height by holders, colour class by how many."""
    holders = [len(each) for each in layers["holders"]]
    most, count = max([*holders, 2]), max(1, len(holders))
    step = DRAWING.width / count
    kinds = ("lost", "single", "good")
    return [
        {
            "x": step * layer,
            "width": max(0.5, step - min(3.0, step / 5)),
            # A lost layer is lower than any that is held, on a ground that the eye does not miss.
            "height": 6.0 if depth == 0 else 20.0 + 60.0 * depth / most,  # of 82
            "kind": kinds[min(depth, 2)],
            "layer": layer,
            "holders": depth,
        }
        for layer, depth in enumerate(holders)
    ]


def held_drawing(peers: Sequence[Json], layers: int) -> Json:
    """A bar for each peer over its layers, in percent of the model's width; where there are many
    peers, those with the same layers share a bar."""
    held = [
        peer
        for peer in peers
        if peer["state"] != "gone" and 0 <= peer["start"] < peer["end"] <= layers
    ]
    together = len(held) > DRAWING.boxes_drawn_max
    groups: dict[tuple[int, int, str, str], list[Json]] = {}
    for peer in held:
        key = (peer["start"], peer["end"], held_kind(peer), "" if together else peer["id"])
        groups.setdefault(key, []).append(peer)
    shown = sorted(groups, key=lambda key: (-len(groups[key]), key))[: DRAWING.bars_drawn_max]
    bars = []
    for start, end, kind, one in sorted(shown):
        members = groups[start, end, kind, one]
        name = members[0]["name"] if len(members) == 1 else f"{len(members)} peers"
        bars.append(
            {
                "x": 100 * start / layers,
                "width": 100 * (end - start) / layers,
                "kind": kind,
                "label": _short(name),
                "text": f"{name}: layers {start}–{end - 1}",
            }
        )
    return {"bars": bars, "left_out": len(groups) - len(shown)}


def held_kind(peer: Json) -> str:
    """The colour class of a peer's bar: it serves, is not believed, or may serve soon."""
    if peer["counts"]:
        return "answered"
    return "lost" if peer["flags"] or peer["state"] == "silent" else "waiting"


def _short(name: str) -> str:
    return name if len(name) <= 15 else f"{name[:14]}…"


def throughput_drawing(past: Json, now_unix_s: float) -> Json:
    """Bars of the swarm's tokens/s in each step of a span. Heights in percent of the axis."""
    step_s = past["step_s"]
    top = nice_top(max((each["tokens"] / step_s for each in past["served"]), default=0.0))
    bars = [
        {
            "x": at,
            "height": 100 * each["tokens"] / step_s / top,
            "text": f"{_clock(each)}: {each['tokens'] / step_s:.1f} tokens/s,"
            f" {each['answers']:.0f} answers",
        }
        for at, each in _steps(past, "served", now_unix_s)
        if each["tokens"]
    ]
    total = {key: sum(each[key] for each in past["served"]) for key in ("answers", "tokens")}
    marks = [f"{share * top:,.10g}" for share in (0, 0.5, 1)]
    return {**_axes(past, now_unix_s, marks), "bars": bars, **total}


def latency_drawing(past: Json, now_unix_s: float) -> Json:
    """Lines of the time to the first token, with gaps where no request was answered; steps with
    requests that failed are marked."""
    steps = _steps(past, "probes", now_unix_s)
    slowest_s = max((each["ttft_p95_s"] or 0.0 for _, each in steps), default=0.0)
    top = nice_top(slowest_s)
    lines = []
    for kind in ("p50", "p95"):
        known = [(at, each[f"ttft_{kind}_s"]) for at, each in steps]
        drawn = [(at, value) for at, value in known if value is not None]
        for _, run in groupby(enumerate(drawn), key=lambda item: item[1][0] - item[0]):
            points = [f"{at + 0.5:.1f},{100 - 100 * value / top:.1f}" for _, (at, value) in run]
            # One alone is drawn as a dot, which is a line to itself with round ends.
            many = points if len(points) > 1 else points * 2
            lines.append({"kind": kind, "points": " ".join(many)})
    failed = [
        {
            "x": at,
            "text": f"{_clock(each)}: {each['requests'] - each['answered']:.0f}"
            f" of {each['requests']:.0f} failed",
        }
        for at, each in steps
        if each["answered"] < each["requests"]
    ]
    in_s = top >= 1
    marks = [f"{share * top * (1 if in_s else 1000):.10g}" for share in (0, 0.5, 1)]
    marks[2] += " s" if in_s else " ms"
    total = {key: sum(each[key] for each in past["probes"]) for key in ("requests", "answered")}
    return {**_axes(past, now_unix_s, marks), "lines": lines, "failed": failed, **total}


def nice_top(most: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below ``most``; 1 of nothing."""
    if most <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(most))
    return next((size * by for by in (1, 2, 5) if most <= size * by), size * 10)


def _begin_unix_s(past: Json, now_unix_s: float) -> int:
    return span_from_json(past).begin_unix_s(now_unix_s)


def _steps(past: Json, what: str, now_unix_s: float) -> list[tuple[int, Json]]:
    """The span's steps with their places in it, oldest first."""
    begin_unix_s, step_s = _begin_unix_s(past, now_unix_s), past["step_s"]
    placed = [(int(each["start_unix_s"] - begin_unix_s) // step_s, each) for each in past[what]]
    return [(at, each) for at, each in placed if 0 <= at < past["span_s"] // step_s]


def _axes(past: Json, now_unix_s: float, marks: Sequence[str]) -> Json:
    """Ticks in percent of both axes: at round UTC times, and for ``marks`` from the bottom up."""
    begin_unix_s, span_s = _begin_unix_s(past, now_unix_s), past["span_s"]
    tick_s = next((each for each in TICKS_S if span_s / each <= DRAWING.ticks_max), TICKS_S[-1])
    first_unix_s = -(-begin_unix_s // tick_s) * tick_s
    form = "%a" if tick_s == TICKS_S[-1] else "%H:%M"
    return {
        "name": past["name"],
        "steps": span_s // past["step_s"],
        "times": [
            {"at": 100 * (at_unix_s - begin_unix_s) / span_s, "label": _utc(at_unix_s, form)}
            for at_unix_s in range(first_unix_s, begin_unix_s + span_s + 1, tick_s)
        ],
        "marks": [
            {"at": 100 - 100 * number / (len(marks) - 1), "label": label}
            for number, label in enumerate(marks)
        ],
    }


def _clock(step: Json) -> str:
    return _utc(step["start_unix_s"], "%a %H:%M")


def _utc(at_unix_s: float, form: str) -> str:
    return datetime.fromtimestamp(at_unix_s, UTC).strftime(form)
