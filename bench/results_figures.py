"""Figures that the documents' templates (``bench/reports``) need and results do not hold as such.

Each function is pure and takes a result as it was recorded.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from bench.families.large_models import LARGE
from bench.gpu.floors import impossible
from bench.report import flat, of

Row = dict[str, Any]

CHECKS = {
    "answers": "answers",
    "time": "time to the first token",
    "memory_peak": "memory at the peak",
    "memory_after": "memory after",
    "processes": "processes",
    "joining": "joining",
    "plans": "plans",
    "clients_plans": "clients' plans",
    "gain": "gain",
    "terminals": "terminals",
}
"""Conditions of an attack's row, in words."""
DRAFTING = {
    "alone": "stand-in, on paper",
    "stand_in": "stand-in",
    "brook": "brook",
    "brook_drafter": "brook and its drafter",
}
"""Parts of the result on drafts, by the model that they ask."""
STEPS = {
    "decode_1_128": "1 decode, 128 tokens before it",
    "decode_1_2048": "1 decode, 2,048",
    "decode_1_8192": "1 decode, 8,192",
    "decode_8_2048": "8 decodes, 2,048",
    "decode_64_128": "64 decodes, 128",
    "decode_64_2048": "64 decodes, 2,048",
    "decode_64_8192": "64 decodes, 8,192",
    "decode_256_128": "256 decodes, 128",
    "decode_256_2048": "256 decodes, 2,048",
    "prefill_512": "a chunk of 512",
    "prefill_2048": "a prompt of 2,048",
}
"""Steps that a GPU was timed with, in words."""


def named(result: Row, names: dict[str, str]) -> list[Row]:
    """The parts of a result that have a name, in the names' order."""
    return [{"name": name, **result[part]} for part, name in names.items() if part in result]


FAULTS = {
    "clock": "a clock jumps",
    "cable": "a cable is pulled",
    "part": "the network is parted",
    "kill": "a peer is killed",
    "stop": "a peer is stopped, as in sleep",
    "pid": "a container shares its temporary directory",
    "memory": "something else takes its memory",
}
"""Faults of the harness, in words."""


def faults(result: Row) -> list[Row]:
    """How often each fault came, and the worst of what followed."""
    by_name: dict[str, list[Row]] = {}
    for each in result["faults"]:
        by_name.setdefault(each["fault"], []).append(each)
    return [
        {
            "name": words,
            "times": len(came),
            "silent_s": max(each["silent_s"] for each in came),
            "back_s": max(each["back_s"] for each in came),
            "failed": sum(len(each["failed"]) for each in came),
            "held": sum(each["holds"] for each in came),
        }
        for name, words in FAULTS.items()
        if (came := by_name.get(name))
    ]


def attacks(result: Row) -> list[Row]:
    """What each attack sent and cost."""
    return [
        row
        | {
            "name": row["name"].replace("_", " "),
            "sent_mb": row["sent"]["bytes"] / 1e6,
            "failures": len(row["failed"]),
            "after": ", then ".join(
                f"{each['more_after_mib']:.0f}" for each in (row.get("first"), row) if each
            ),
            "broken": ", ".join(CHECKS[each] for each, ok in row["checks"].items() if not ok),
        }
        for row in flat(result["rows"], "name")
    ]


def engines(result: Row) -> list[Row]:
    """What one engine was measured with, and the quartiles of its ratios where they are known."""
    rows = flat(result["models"], "model", "name")
    for row in rows:
        known = row.get("ratio_quartiles")
        row["quartiles"] = " ({} to {})".format(*known) if known else ""
    return rows


def highest_rates(result: Row) -> Row:
    """The highest bandwidth and rate of products that were measured beside models of real sizes."""
    measured = [*chain(*(found["weights"].values() for found in result["models"].values()))]
    return {key: max(each[key] for each in measured) for key in ("bytes_per_s", "flops_per_s")}


def real_sizes(result: Row) -> list[Row]:
    """Models of real sizes: times the floors that the highest measured rates give."""
    highest, rows = highest_rates(result), []
    for model in flat(result["models"], "model"):
        for row in flat(model["weights"], "weights"):
            if "unavailable" in row:
                continue
            reads, multiplies = (highest[rate] / row[rate] for rate in highest)
            row["ttft_512_times_floor"] *= multiplies
            for times in ("times_floor", "engine_times_floor"):
                row[times] = {streams: each * reads for streams, each in row[times].items()}
            rows.append({**model, **row})
    return rows


def beside_llama_cpp(result: Row) -> list[Row]:
    """Files that both this engine and llama.cpp ran."""
    return [
        {**model, **row}
        for model in flat(result["models"], "model")
        for row in flat(model, "kind")
        if "decode_of_llama_cpp" in row
    ]


def gpu_shapes(parts: Row) -> list[Row]:
    """Each shape that the parts of a check ran."""
    found = (part.get("found", {}).get("shapes", {}) for part in parts.values())
    return [row for shapes in found for row in flat(shapes, "shape")]


def gpu_steps(parts: Row) -> Iterator[Row]:
    """Each shape's steps, with the µs that a layer takes in each; None for what cannot be."""
    for name in (name for name in parts if name.startswith("engine")):
        for row in gpu_shapes({name: parts[name]}):
            shape = row["shape"] + " without kernels" * ("without" in name)
            for point, step in STEPS.items():
                told, tokens = row.get(point), int(point.split("_")[1])
                if not isinstance(told, dict) or not {"kernels_us", "layer_tokens_per_s"} & set(
                    told
                ):
                    continue
                layers = {}
                for key, rate in told.items():
                    if not key.endswith("layer_tokens_per_s"):
                        continue
                    within_us = told.get("kernels_us", 0.0) if key.startswith("layer") else 0.0
                    times_us = 1e6 * tokens / rate, told["floor_us"], within_us
                    refused = impossible(*(each / 1e6 for each in times_us))
                    layers[key.replace("tokens_per_s", "us")] = None if refused else times_us[0]
                if layers.get("layer_us", 0.0) is None:  # which the share follows from
                    layers["share_of_matrix_rate"] = None
                yield {"shape": shape, "step": step, **told, **layers}


def gpu_packed(result: Row) -> list[Row]:
    """The quickest µs of each kind of product, for each size."""
    rows: dict[tuple[str, int], Row] = {}
    for row in result["rows"]:
        size = {"product": row["product"], "rows": row["tokens"]}
        each = rows.setdefault((row["product"], row["tokens"]), size)
        kind = row["variant"] if isinstance(row["variant"], str) else "packed"
        if "microseconds" in row:
            each[kind] = min(row["microseconds"], each.get(kind, row["microseconds"]))
    return list(rows.values())


def speculation(result: Row) -> list[Row]:
    """Answers with drafts and without: by model, setting and text."""
    return [
        {"identical": True, **row, "model": model}
        for part, model in DRAFTING.items()
        for row in flat(result.get(part, {}), "trip", "text")
    ]


def large_models(result: Row) -> list[Row]:
    """What came of each large model, and how it is published."""
    told = {"same": "served", "unknown": "not made"}
    rows = []
    for name, (found, why) in result["models"].items():
        model = LARGE[name]
        kind = f"{model.family} ({model.text_type})" if model.text_type else model.family
        outcome = ": ".join(part for part in (told.get(found, found), why) if part)
        packed = model.packed or "16 bits"
        rows.append({"name": name, "kind": kind, "packed": packed, "outcome": outcome})
    return rows


def noise(rows: list[Row]) -> float:
    """How far two runs differ that do the same: on random text nothing is drafted."""
    return max(abs(row["gain"] - 1) for row in rows if row["text"] == "random")


def placements(result: Row) -> list[Row]:
    """Clusters with what each planner's placement serves."""
    return [
        case | {row["planner"]: row.get("simulated_tokens_per_s") for row in case["planners"]}
        for case in result["cases"]
    ]


def live_plans(result: Row) -> list[Row]:
    """Clusters with the best of the simple placements, by our rules and by Helix's."""
    return [
        row | {"simple": row["rivals"][row["best"]], "by_simple": row["by_helix"][row["best"]]}
        for row in result["rows"]
    ]


def ratios(rows: list[Row], part: str, whole: str) -> list[float]:
    """A part of a whole in each of the rows that have both."""
    found = (of(row, part, whole) for row in rows)
    return [each for each in found if each is not None]
