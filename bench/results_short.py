"""The few figures that README.md gives; docs/measurements.md has all of them."""

from typing import Any

from bench.report import made, table
from bench.results_sessions import STRIKES
from bench.results_speculation import rows_of


def gpus(result: dict[str, Any]) -> str:
    """How many GPUs of a kind hold a model, and how fast they would be."""
    kinds = result["kinds"]
    heads = [f"{kind} ({sheet['memory_gib']:.0f} GiB)" for kind, sheet in kinds.items()]
    return (
        "The fewest GPUs of a kind that hold a model together, and about how many tokens/s one"
        f" answer that is alone gets over links of {result['mbit']:.0f} Mbit/s and"
        f" {result['ms']:.0f} ms, without drafts: from data sheets, as nobody has measured this"
        f" software on these GPUs {made('gpu_fit')}. More GPUs make it quicker, and serve more"
        " people; `anabranch plan --gpus` reckons it for yours:\n\n"
    ) + table(
        " | ".join(["model", "weights in", "GiB", *heads]),
        " | ".join(
            ["{model}", "{precision}", "{weights_gib:.0f}", *(f"{{on_{k}}}" for k in kinds)]
        ),
        [
            {**row, **{f"on_{kind}": _cell(found) for kind, found in row["gpus"].items()}}
            for row in result["rows"]
        ],
    )


def _cell(found: dict[str, Any] | None) -> str:
    return f"{found['count']}: {found['alone_tokens_per_s']:.3g}/s" if found else "–"


def speed_in_short(result: dict[str, Any]) -> str:
    """What it costs to be a swarm."""
    ratios = [
        figures["median"]["ratio"]
        for by_peers in result["models"].values()
        for figures in by_peers.values()
    ]

    def span(key: str) -> str:
        found = [ratio[key] for ratio in ratios]
        return f"{min(found):.2f} to {max(found):.2f}"

    return (
        f"- Two and three peers on one machine of {result['cores']} cores, beside `transformers` in"
        f" one process: {span('one_stream')} times its tokens/s for one answer,"
        f" {span('eight_streams')} times for eight at once {made('local')}."
    )


def strikes_in_short(result: dict[str, Any]) -> str:
    """What is felt of a volunteer that vanishes."""
    struck = [result[kind] for kind in STRIKES if kind in result]
    kill = result["kill"]
    return (
        f"- {sum(each['trials'] for each in struck)} peers killed, frozen or cut off in the middle"
        f" of an answer: {sum(each['tokens_lost'] + each['tokens_repeated'] for each in struck)}"
        f" tokens lost or repeated, {sum(each['answers_that_differ'] for each in struck)} answers"
        f" changed, {sum(each['requests_failed'] for each in struck)} failed; a killed stage is a"
        f" gap of {kill['gap_p50_s']:.2f} s (p95 {kill['gap_p95_s']:.2f}) {made('chaos')}."
    )


def drafts_in_short(result: dict[str, Any]) -> str:
    """What drafts bring."""
    trip = "70 B, 50 ms"
    gains = ", ".join(
        f"{row['gain']:.1f} × on {text}" for text, row in result["stand_in"][trip].items()
    )
    differ = sum(not row["identical"] for row in rows_of(result))
    return (
        f"- Drafts over a network ({trip} between three stages that take the times of RTX 3090s,"
        f" simulated): {gains}; {differ} answers changed {made('speculation')}."
    )
