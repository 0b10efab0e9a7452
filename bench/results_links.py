"""What the documents say of links: policies, hops, rows in eight bits, micro-batches."""

from operator import itemgetter
from typing import Any

from bench.report import made, table

TIMES = "{ttft_mean_s:.2f}, {ttft_p95_s:.2f} s | {tpot_mean_s:ms}, {tpot_p95_s:ms} ms"
FLOOR = "{floor[ttft_s]:.2f} s, {floor[tpot_s]:ms} ms"
HOP = {
    "round_trip_4_kib_ms": ("round trip of 4 KiB", "ms"),
    "round_trip_16_kib_ms": ("round trip of 16 KiB", "ms"),
    "mb_per_s": ("throughput", "MB/s"),
    "cpu_ms_per_mb": ("processor time per MB, both sides", "ms"),
}


def links(result: dict[str, Any]) -> str:
    """Policies for links, beside each other."""
    source = made("papers/molink", "papers molink")[:-1]
    return (
        "Links in MoLink's setting (EMNLP Findings 2025): three stages of a model with Qwen-7B's"
        " shapes over 100 Mbit/s and 30 ms, under a virtual clock; sessions, stages and link"
        " schedulers are the project's own, the engine waits as long as an RTX 4090 would"
        f" {source}; [docs/results.md](docs/results.md) has other bandwidths and delays, too):\n\n"
    ) + table(
        "requests/s, Mbit/s, ms | policy | TTFT mean, p95 | TPOT mean, p95 | floor",
        f"{{requests_per_s}}, {{mbit:.0f}}, {{delay_s:ms}} | {{policy}} | {TIMES} | {FLOOR}",
        result["rows"],
    )


def real_links(result: dict[str, Any]) -> str:
    """The same policies between real processes."""
    virtual = "{virtual_clock[ttft_mean_s]:.2f} s, {virtual_clock[tpot_mean_s]:ms} ms"
    return (
        "MoLink's setting once more, 0.3 requests/s over 100 Mbit/s and 30 ms, now with"
        f" {result['what']} {made('wan_real')}:\n\n"
    ) + table(
        "policy | requests | TTFT mean, p95 | TPOT mean, p95 | under the virtual clock | floor",
        f"{{policy}} | {{requests}} | {TIMES} | {virtual} | {FLOOR}",
        result["rows"],
    )


def measured_links(result: dict[str, Any]) -> str:
    """What a swarm knows of its links."""
    return (
        f"{len(result['links'])} directed links between five peers in network namespaces (10 to"
        " 100 Mbit/s, round trips of 10 to 80 ms), as anybody reads them from the DHT: bandwidths"
        f" are off by {result['bandwidth_error_max']:.0%} at most, round trips by"
        f" {result['rtt_error_max']:.0%} {made('links')}."
    )


def hop(result: dict[str, Any]) -> str:
    """What the daemon costs beside TCP, and beside any daemon at all."""
    return (
        "A hop on loopback, medians; a process on either side that relays and encrypts"
        f" (`bench/relay.py`) is the least that any daemon costs {made('transport')}:\n\n"
    ) + table(
        "| TCP | two plain relays and a cipher | p2p daemon",
        "{title} | {tcp:.3g} {unit} | {relayed:.3g} {unit} ({relayed_costs_times:.1f}×)"
        " | {p2p:.3g} {unit} ({p2p_costs_times:.1f}×)",
        _hops(result, "tcp", "relayed", "relayed_costs_times", "p2p", "p2p_costs_times"),
    )


def light_hop(result: dict[str, Any]) -> str:
    """What a hop costs between light peers and others."""
    medians = result["medians"]
    pairs = ["tcp", *(pair for pair in medians if pair != "tcp")]
    return (
        "The same with light peers (py-libp2p, no daemon); who sends → who receives"
        f" {made('light_transport')}:\n\n"
    ) + table(
        "| " + " | ".join(pairs).replace("tcp", "TCP").replace("_to_", " → "),
        "{title} | " + " | ".join(f"{{{pair}:.3g}} {{unit}}" for pair in pairs),
        _hops(medians, *pairs),
    )


def _hops(found: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    return [
        {"title": title, "unit": unit, **{kind: found[kind][name] for kind in kinds}}
        for name, (title, unit) in HOP.items()
    ]


def int8(result: dict[str, Any]) -> str:
    """What rows in eight bits do to answers."""
    return (
        f"Rows of 8 bits between stages (`--int8-rows`), bundled model, {result['prompts']}"
        f" prompts, beside float32; logits spread by {result['logit_spread']:.1f}"
        f" {made('int8')}:\n\n"
    ) + table(
        "rows on the wire | logit error mean, max | same top token | greedy answers equal"
        " | loss changes by",
        "{name} | {logit_error_mean:.4f}, {logit_error_max:.3f} | {top_token_agrees:.2%}"
        " | {greedy_answers_equal:.0%} | {loss_change:+.1e}",
        [{"name": name, **wire} for name, wire in result["wires"].items()],
    )


def groups(result: dict[str, Any]) -> str:
    """What stages choose as the decodes of a step, beside fixed bounds."""
    rows: dict[tuple[float, ...], dict[Any, Any]] = {}
    shape = itemgetter("stages", "step_ms", "row_us", "delay_ms")
    for cell in sorted(result["cells"], key=shape):
        row = rows.setdefault(shape(cell), {**cell})
        row[cell["decodes_max"] or "chosen"] = cell["tokens_per_s"]
    sizes = sorted({cell["decodes_max"] or 0 for cell in result["cells"]} - {0}, reverse=True)
    columns = {"chosen": "chosen"} | {size: f"{size} a step" for size in sizes}
    return (
        f"Micro-batches, tokens/s: {result['what']}, `chosen` what stages do"
        f" (`coordinator/batching/micro_batches.py`) {made('wan_groups', 'wan groups')}:\n\n"
    ) + table(
        "stages, step, a row, delay | " + " | ".join(columns.values()),
        "{stages}, {step_ms:.0f} ms, {row_us:.0f} µs, {delay_ms:.0f} ms | "
        + " | ".join(f"{{{n}:.0f}}" for n in columns),
        rows.values(),
    )
