"""The few figures that README.md gives; docs/measurements.md has all of them."""

from typing import Any

from bench.report import made, table


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
