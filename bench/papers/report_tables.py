"""Tables of docs/results.md, one function for each shape of result."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from bench.papers.helix import published_sums

Recipe = dict[str, Any]
Row = dict[str, Any]

MOLINK_POLICIES = ("fifo", "molink", "anabranch", "anabranch+int8")


def number(value: float | None, digits: int = 1) -> str:
    """A figure, or a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def served(recipe: Recipe) -> list[str]:
    """What placements serve, beside the published figure."""
    lines = [
        "| cluster | placement | scheduler | links | load | published tokens/s | simulated |"
        " difference | prompt s, mean / P50 / P99 | token s, mean / P50 / P99 | KV peak |"
        " × real time |",
        "|---|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in [*recipe["rows"], *sums(recipe)]:
        figure = row["published_tokens_per_s"]
        off = "–" if figure is None else f"{row['tokens_per_s'] / figure - 1:+.1%}"
        times = [
            " / ".join(number(row.get(f"{kind}{suffix}_s"), 2) for suffix in ("", "_p50", "_p99"))
            for kind in ("prompt", "token")
        ]
        planned = row.get("planned_s")
        placement = row["placement"] + (f" ({planned:.0f} s)" if planned else "")
        lines.append(
            f"| {row['cluster']}/{row['model']} | {placement} | {row['scheduler']} |"
            f" {row['links']} | {row['mode']} | {number(figure)} |"
            f" {row['tokens_per_s']:.1f} | {off} | {times[0]} | {times[1]} |"
            f" {number(row.get('kv_peak'), 2)} | {number(row.get('times_real'), 0)} |"
        )
    return lines


def sums(recipe: Recipe) -> list[Row]:
    """The clusters of one GPU type together, as Helix reports LLaMA 30B.

    Their prompts' mean time is by the sessions that each answers.
    """
    found: dict[tuple[str, str], Row] = {}
    known = published_sums()
    for row in recipe["rows"]:
        whole, _, part = row.get("cluster", "").partition("_sub_")
        if not part:
            continue
        key = whole, row["placement"]
        if key not in found:
            found[key] = {
                **{name: row[name] for name in ("model", "scheduler", "links", "mode")},
                "cluster": whole,
                "placement": f"{row['placement']}, three replicas",
                "tokens_per_s": 0.0,
                "prompt_s": 0.0,
                "published_tokens_per_s": known.get("/".join(key)),
            }
        total = found[key]
        weight = row["tokens_per_s"]
        before = total["tokens_per_s"]
        total["prompt_s"] = (total["prompt_s"] * before + row["prompt_s"] * weight) / (
            before + weight
        )
        total["tokens_per_s"] = before + weight
    return list(found.values())


def search(recipe: Recipe) -> list[str]:
    """Quality over the planner's time."""
    lines = [
        "Max flow, the estimate that chooses among plans, and what the plan serves with our"
        " scheduler.",
        "",
        "| cluster | limit s | took s | max flow | estimated tokens/s | simulated tokens/s |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {r['cluster']}/{r['model']} | {r['limit_s']:g} | {r['searched_s']:.1f}"
        f" | {r['flow_tokens_per_s']:.0f} | {r['estimate_tokens_per_s']:.1f}"
        f" | {r['tokens_per_s']:.1f} |"
        for r in recipe["rows"]
    ]
    return lines


def molink(recipe: Recipe) -> list[str]:
    """Policies side by side, one line for each setting."""
    lines = [
        "Three stages of a model with Qwen-7B's shapes; sessions, stages, hops and link schedulers"
        " are the project's own under a virtual clock, the engine waits as long as an RTX 4090"
        " would (a stand-in, so figures compare policies here and are not MoLink's own: at its best"
        " it reports a TTFT of 3.23 s and a TPOT of 260 ms). `fifo`: whole prompts in order;"
        " `molink`: its Algorithm 1; `anabranch`: 64-token chunks, decodes first, credits;"
        " `+int8`: prompts' rows as int8. Each cell: TTFT mean / P95 s, TPOT mean / P95 ms. The"
        " floor is a lone request's.",
        "",
        "| requests/s, Mbit/s, ms | " + " | ".join(MOLINK_POLICIES) + " | floor | best |",
        "|---|" + "--:|" * len(MOLINK_POLICIES) + "--:|---|",
    ]

    def setting(row: Row) -> tuple[float, float, float]:
        return row["requests_per_s"], row["mbit"], round(row["delay_s"] * 1e3, 3)

    for (rate, mbit, delay_ms), group in groupby(sorted(recipe["rows"], key=setting), setting):
        by_policy = {row["policy"]: row for row in group}
        cells = [_molink_cell(by_policy.get(policy)) for policy in MOLINK_POLICIES]
        floor = next(iter(by_policy.values()))["floor"]
        first = min(by_policy, key=lambda p: by_policy[p]["ttft_mean_s"])
        next_ = min(by_policy, key=lambda p: by_policy[p]["tpot_mean_s"])
        best = first if first == next_ else f"TTFT {first}, TPOT {next_}"
        lines.append(
            f"| {rate:g}, {mbit:g}, {delay_ms:g} | {' | '.join(cells)}"
            f" | {floor['ttft_s']:.2f} s, {floor['tpot_s'] * 1e3:.0f} ms | {best} |"
        )
    return lines


def _molink_cell(row: Row | None) -> str:
    if row is None:
        return "–"
    return (
        f"{row['ttft_mean_s']:.2f} / {row['ttft_p95_s']:.2f},"
        f" {row['tpot_mean_s'] * 1e3:.0f} / {row['tpot_p95_s'] * 1e3:.0f}"
    )


def change(recipe: Recipe) -> list[str]:
    """A link's bandwidth falls and returns."""
    row = recipe["rows"][0]
    lines = ["| phase | requests | TTFT mean / P95 s | TPOT mean / P95 ms |", "|---|--:|--:|--:|"]
    lines += [
        f"| {name} | {p['requests']} | {p['ttft_mean_s']:.2f} / {p['ttft_p95_s']:.2f}"
        f" | {p['tpot_mean_s'] * 1e3:.0f} / {p['tpot_p95_s'] * 1e3:.0f} |"
        for name, p in row["phases"].items()
    ]
    seen = [f"{p['at_s']:.0f} s: {p['estimate_mbit']:.0f}" for p in _every(row["trace"], 12)]
    lines += ["", f"The sender's estimate of the link, Mbit/s: {'; '.join(seen)}."]
    return lines


def _every(points: Sequence[Row], count: int) -> Sequence[Row]:
    return points[:: max(1, len(points) // count)]
