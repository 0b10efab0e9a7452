"""Tables of docs/results.md, one function for each shape of result."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from bench.papers.helix import published_sums
from bench.report import fill, table

Recipe = dict[str, Any]
Row = dict[str, Any]

TIMES = (
    "{prompt_s:.2f} / {prompt_p50_s:.2f} / {prompt_p99_s:.2f}"
    " | {token_s:.2f} / {token_p50_s:.2f} / {token_p99_s:.2f}"
)
MOLINK_POLICIES = (
    "fifo",
    "molink",
    "fifo+chunks",
    "molink+chunks",
    "anabranch",
    "anabranch+int8",
)


def served(recipe: Recipe) -> list[str]:
    """What placements serve, beside the published figure."""
    rows = []
    for row in [*recipe["rows"], *sums(recipe)]:
        figure, planned = row["published_tokens_per_s"], row.get("planned_s")
        off = None if figure is None else row["tokens_per_s"] / figure - 1
        rows.append({**row, "off": off, "planned": f" ({planned:.0f} s)" if planned else ""})
    heads = (
        "cluster | placement | scheduler | links | load | published tokens/s: | simulated:"
        " | difference: | prompt s, mean / P50 / P99: | token s, mean / P50 / P99: | KV peak:"
        " | × real time:"
    )
    cells = (
        "{cluster}/{model} | {placement}{planned} | {scheduler} | {links} | {mode}"
        " | {published_tokens_per_s:.1f} | {tokens_per_s:.1f} | {off:+.1%} | "
        f"{TIMES} | {{kv_peak:.2f}} | {{times_real:.0f}}"
    )
    return [table(heads, cells, rows)]


def split(recipe: Recipe) -> list[str]:
    """What each part of the rules brings, then the plan: factors on the line before."""
    rows, before = [], 0.0
    for row in recipe["rows"]:
        first = (row["placement"], row["rules"]) == ("helix", "helix")
        factor = None if first or row["rules"] == "helix" else row["tokens_per_s"] / before
        rows.append({**row, "factor": factor})
        before = row["tokens_per_s"]
    return [
        "From Helix's simulator to a living swarm, one thing at a time, with Helix's plan; then our"
        " plan by the same rules, and by Helix's.",
        "",
        table(
            "cluster | plan | rules | tokens/s: | × the line before: | prompt s, mean / P50 / P99:"
            " | token s, mean / P50 / P99:",
            f"{{cluster}}/{{model}} | {{placement}} | {{rules}} | {{tokens_per_s:.1f}}"
            f" | {{factor:.2f}} | {TIMES}",
            rows,
        ),
    ]


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
    heads = "cluster | limit s: | took s: | max flow: | estimated tokens/s: | simulated tokens/s:"
    cells = (
        "{cluster}/{model} | {limit_s:g} | {searched_s:.1f} | {flow_tokens_per_s:.0f}"
        " | {estimate_tokens_per_s:.1f} | {tokens_per_s:.1f}"
    )
    return [
        "Max flow, the estimate that chooses among plans, and what the plan serves with our"
        " scheduler.",
        "",
        table(heads, cells, recipe["rows"]),
    ]


def molink(recipe: Recipe) -> list[str]:
    """Policies side by side, one line for each setting."""
    cell = "{ttft_mean_s:.2f} / {ttft_p95_s:.2f}, {tpot_mean_s:ms} / {tpot_p95_s:ms}"

    def setting(row: Row) -> tuple[float, float, float]:
        return row["requests_per_s"], row["mbit"], round(row["delay_s"] * 1e3, 3)

    rows = []
    for (rate, mbit, delay_ms), group in groupby(sorted(recipe["rows"], key=setting), setting):
        by_policy = {row["policy"]: row for row in group}
        known = [by_policy.get(policy) for policy in MOLINK_POLICIES]
        first = min(by_policy, key=lambda p: by_policy[p]["ttft_mean_s"])
        next_ = min(by_policy, key=lambda p: by_policy[p]["tpot_mean_s"])
        rows.append(
            {
                "setting": f"{rate:g}, {mbit:g}, {delay_ms:g}",
                "cells": " | ".join("–" if row is None else fill(cell, row) for row in known),
                "floor": next(iter(by_policy.values()))["floor"],
                "best": first if first == next_ else f"TTFT {first}, TPOT {next_}",
                "lost": _lost(by_policy),
            }
        )
    return [
        "Three stages of a model with Qwen-7B's shapes; sessions, stages, hops and link schedulers"
        " are the project's own under a virtual clock, the engine waits as long as an RTX 4090"
        " would (a stand-in, so figures compare policies here and are not MoLink's own: at its best"
        " it reports a TTFT of 3.23 s and a TPOT of 260 ms). `fifo`: whole prompts in order;"
        " `molink`: its Algorithm 1 as printed, T_a from profiles, paced by acknowledgements;"
        " `+chunks`: prompts are computed in our chunks, so that what is left between them and"
        " `anabranch` is the order on the links; `anabranch`: chunks, decodes first, credits;"
        " lines of commit 4975d0f are from before: there `molink` guessed T_a from the decodes"
        " before and bounded nothing on its way, which is **not its best**;"
        " `+int8`: prompts' rows as int8. Each cell: TTFT mean / P95 s, TPOT mean / P95 ms. The"
        " floor is a lone request's.",
        "",
        table(
            f"requests/s, Mbit/s, ms | {': | '.join(MOLINK_POLICIES)}: | floor: | best | we lose",
            "{setting} | {cells} | {floor[ttft_s]:.2f} s, {floor[tpot_s]:ms} ms | {best} | {lost}",
            rows,
        ),
    ]


def _lost(by_policy: dict[str, Row]) -> str:
    """In what ``anabranch`` is behind another policy with chunks or without, in words."""
    mine = by_policy.get("anabranch")
    theirs = [row for name, row in by_policy.items() if not name.startswith("anabranch")]
    behind = [
        what.upper()
        for what in ("ttft", "tpot")
        if mine is not None
        and any(row[f"{what}_mean_s"] < mine[f"{what}_mean_s"] for row in theirs)
    ]
    return f"**{', '.join(behind)}**" if behind else "–"


def change(recipe: Recipe) -> list[str]:
    """A link's bandwidth falls and returns."""
    row = recipe["rows"][0]
    seen = [f"{p['at_s']:.0f} s: {p['estimate_mbit']:.0f}" for p in _every(row["trace"], 12)]
    return [
        table(
            "phase | requests: | TTFT mean / P95 s: | TPOT mean / P95 ms:",
            "{name} | {requests} | {ttft_mean_s:.2f} / {ttft_p95_s:.2f}"
            " | {tpot_mean_s:ms} / {tpot_p95_s:ms}",
            [{"name": name, **phase} for name, phase in row["phases"].items()],
        ),
        "",
        f"The sender's estimate of the link, Mbit/s: {'; '.join(seen)}.",
    ]


def _every(points: Sequence[Row], count: int) -> Sequence[Row]:
    return points[:: max(1, len(points) // count)]
