"""What was measured on a GPU, as a table (:mod:`bench.results_table`)."""

from collections.abc import Iterator
from typing import Any

from bench.report import made, table

POINTS = {
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


def gpu(result: dict[str, Any]) -> str:
    """Layers of large models' shapes against the card's memory and multipliers."""
    parts = result["parts"]
    tests = parts["tests"]["found"]
    failed = len(tests["failure"]) + len(tests["error"])
    drift = parts["drift"]["found"]["shapes"]["llama-3-8b"]
    told = [
        "## A GPU",
        _where(result, "gpu_check"),
        "Layers of large models' shapes with random weights in bfloat16, or in the packed format"
        " that their name ends in. The floor of a decode is what must be read over the measured"
        " bandwidth, for prompts that or the multiplications over the measured rate of one large"
        " product, whichever takes longer; kernels' times are sums without gaps; `transformers`"
        " runs the same layers eagerly, and in its continuous batching with the attention that it"
        " finds; what a step takes beside its layers is paid once, whatever their number:",
        table(
            "shape | step | floor, µs: | kernels, µs: | times the floor: | launches: |"
            " a layer in a step, µs: | of the matrix rate: | transformers, µs: |"
            " its batching, µs: | beside layers, ms:",
            "{shape} | {step} | {floor} | {kernels} | {times} | {launches} | {layer} | {rate} |"
            " {eager} | {batching} | {beside}",
            [row for name, part in parts.items() for row in _rows(name, part)],
        ),
        "A decode as a peer with these layers would announce it, timed by itself, behind waits for"
        " the device:",
        table(
            "shape | announced: 1 decode, µs: | 16: | 64: | 256: | a chunk of 512:",
            "{shape} | {1/1:.0f} | {16/1:.0f} | {64/1:.0f} | {256/1:.0f} | {512/0:.0f}",
            [
                {
                    "shape": shape,
                    **found["announced"]["decode_us"],
                    **found["announced"]["prompt_us"],
                }
                for part in parts.values()
                for shape, found in part.get("found", {}).get("shapes", {}).items()
                if "announced" in found
            ],
        ),
        f"Tests marked `gpu`: {tests['tests'] - failed} of {tests['tests']} passed (every family's"
        " ids in float32 and too little memory among them).",
        "How far one shape's answers are from float32, as the norm of the difference over the"
        " norm, and from those of bfloat16 alone:",
        table(
            "how | median: | most: | from bfloat16, most: | again the same bits",
            "{how} | {error_median} | {error_max} | {own} | {same}",
            [
                {
                    "how": how,
                    **each,
                    "own": each.get("from_bfloat16_max", "–"),
                    "same": "yes" if each["same_bits"] else "no",
                }
                for how, each in drift.items()
                if "refused" not in each
            ],
        ),
    ]
    return "\n\n".join(told)


def gpu_h200(result: dict[str, Any]) -> str:
    """What was seen on another card alone."""
    parts = result["parts"]
    kernels, sessions = parts["kernels"]["found"], parts["sessions"]["found"]["own_pages"]
    return (
        f"One {parts['environment']['found']['gpu']}, earlier"
        f" {made('gpu_check_h200', 'gpu_check')}: all {kernels['tests']} tests of the kernels that"
        f" there were passed on the card; {sessions['sessions']:,} sessions left"
        f" {sessions['free_tokens_after']:,} of {sessions['free_tokens_before']:,} KV tokens free"
        f" and grew the device's memory by {sessions['grown_device_bytes']:,} bytes."
    )


def gpu_packed(result: dict[str, Any]) -> str:
    """Products by packed matrices beside those by numbers."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for row in result["rows"]:
        each = rows.setdefault((row["product"], row["tokens"]), {"product": row["product"]})
        each["rows"] = row["tokens"]
        kind = row["variant"] if isinstance(row["variant"], str) else "packed"
        if "microseconds" in row:
            each[kind] = min(row["microseconds"], each.get(kind, row["microseconds"]))
    told = [
        f"Products by packed matrices, one {result['gpu']}"
        f" {made('gpu_packed', 'gpu_kernels --packed')}. {result['note']} The quickest tile of"
        " each; beside it one product of bfloat16 by cuBLAS:",
        table(
            "product | rows: | floor, µs: | packed, µs: | bfloat16, µs:",
            "{product} | {rows} | {floor:.0f} | {packed:.0f} | {plain}",
            [
                {**each, "plain": f"{each['bfloat16']:.0f}" if "bfloat16" in each else "–"}
                for each in rows.values()
            ],
        ),
    ]
    return "\n\n".join(told)


def _where(result: dict[str, Any], name: str) -> str:
    card = result["parts"]["environment"]["found"]
    note = f" {result['note']}" if "note" in result else ""
    where = f"One {card['gpu']}: driver {card['driver']}, torch {result['torch']}, Triton"
    return f"{where} {card['triton']} {made(name, 'gpu_check')}.{note}"


def _rows(name: str, part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if not name.startswith("engine"):
        return
    for shape, found in part.get("found", {}).get("shapes", {}).items():
        of = f"{shape} without kernels" if "without" in name else shape
        for point, step in POINTS.items():
            told = found.get(point)
            if not isinstance(told, dict) or not {"kernels_us", "layer_tokens_per_s"} & told.keys():
                continue
            tokens = int(point.split("_")[1])
            yield {
                "shape": of,
                "step": step,
                "floor": _given(told, "floor_us", "{:.0f}"),
                "kernels": _given(told, "kernels_us", "{:.0f}"),
                "times": _given(told, "kernels_times_floor", "{:.2f}"),
                "launches": _given(told, "launches", "{:.0f}"),
                "layer": _microseconds(told, "layer_tokens_per_s", tokens),
                "rate": _given(told, "share_of_matrix_rate", "{:.0%}"),
                "eager": _microseconds(told, "eager_layer_tokens_per_s", tokens),
                "batching": _microseconds(told, "batching_layer_tokens_per_s", tokens),
                "beside": _given(told, "beside_layers_ms", "{:.2f}"),
            }


def _given(told: dict[str, Any], name: str, form: str) -> str:
    return form.format(told[name]) if name in told else "–"


def _microseconds(told: dict[str, Any], name: str, tokens: int) -> str:
    return f"{1e6 * tokens / told[name]:.0f}" if name in told else "–"
