"""Where the lines of the page's drawings go; the template writes them as SVG. Pure."""

from typing import Any

from dht.types import SINK, SOURCE

Json = dict[str, Any]
WIDTH, ROW = 640, 26
EDGES_DRAWN_MAX = 300
ROWS_DRAWN_MAX = 24


def flow_drawing(plan: Json | None) -> Json | None:
    """Boxes and lines of the plan's flow: peers by their first layer, left to right."""
    if plan is None or not plan["edges"]:
        return None
    columns = sorted({each["start"] for each in plan["assignments"]})
    rows: dict[int, int] = dict.fromkeys(columns, 0)
    places: dict[str, tuple[float, float]] = {}
    boxes = []
    step = WIDTH / (len(columns) + 2)
    for each in plan["assignments"]:
        start = each["start"]
        if rows[start] >= ROWS_DRAWN_MAX:
            continue
        x, y = step * (columns.index(start) + 1.5), 20 + ROW * rows[start]
        rows[start] += 1
        places[each["id"]] = (x, y)
        boxes.append(
            {"x": x, "y": y, "label": f"{each['start']}–{each['end'] - 1}", "id": each["id"][-6:]}
        )
    height = 40 + ROW * (max(rows.values(), default=1) - 1)
    for name, x, label in ((SOURCE, step / 2, "in"), (SINK, WIDTH - step / 2, "out")):
        places[name] = (x, height / 2)
        boxes.append({"x": x, "y": height / 2, "label": label, "id": name})
    most = max(e["tokens_per_s"] for e in plan["edges"]) or 1.0
    by_flow = sorted(plan["edges"], key=lambda e: -e["tokens_per_s"])
    lines = [
        {
            "from": places[e["from"]],
            "to": places[e["to"]],
            "width": 0.75 + 4 * e["tokens_per_s"] / most,
            "text": f"{e['tokens_per_s']:.1f} tokens/s",
        }
        for e in by_flow
        if e["from"] in places and e["to"] in places and e["tokens_per_s"] > 0
    ][:EDGES_DRAWN_MAX]
    return {"boxes": boxes, "lines": lines, "width": WIDTH, "height": height}


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
            "height": 6 + 74 * depth / most,
            "kind": kinds[min(depth, 2)],
            "layer": layer,
            "holders": depth,
        }
        for layer, depth in enumerate(holders)
    ]


def sparkline(series: list[Json]) -> Json:
    """TTFT of the last hour's probes; those that failed are marked at the bottom."""
    top = max((each["ttft_s"] for each in series), default=0.0) or 1.0
    step = WIDTH / max(1, len(series) - 1)
    points = [
        (step * at, 56 - 50 * each["ttft_s"] / top) for at, each in enumerate(series) if each["ok"]
    ]
    failed = [step * at for at, each in enumerate(series) if not each["ok"]]
    return {"points": " ".join(f"{x:.1f},{y:.1f}" for x, y in points), "failed": failed, "top": top}
