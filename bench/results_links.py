"""What the documents say of links: policies, hops, rows in eight bits, micro-batches."""

from typing import Any

from bench.report import made, table

TIMES = "{ttft_mean_s:.2f}, {ttft_p95_s:.2f} s | {tpot_mean_s:ms}, {tpot_p95_s:ms} ms"
FLOOR = "{floor[ttft_s]:.2f} s, {floor[tpot_s]:ms} ms"


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


def measured_links(result: dict[str, Any]) -> str:
    """What a swarm knows of its links."""
    return (
        f"{len(result['links'])} directed links between five peers in network namespaces (10 to"
        " 100 Mbit/s, round trips of 10 to 80 ms), as anybody reads them from the DHT: bandwidths"
        f" are off by {result['bandwidth_error_max']:.0%} at most, round trips by"
        f" {result['rtt_error_max']:.0%} {made('links')}."
    )
