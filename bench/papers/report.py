"""Figures that docs/results.md needs and the recipes' results do not hold as such."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from bench.papers.helix import published_sums

Recipe = dict[str, Any]
Row = dict[str, Any]

COMPARED = ("helix-offline-70b", "helix-offline-30b", "helix-online-70b")
CURVE = "helix-curve"
WANTED = {"single24/70b": 1.10, "geo24/70b": 1.6, "het42/70b": 1.10}
"""How many times the best published tokens/s is asked for; 1 elsewhere."""
FAITHFUL = 0.05
"""Maximum difference of a simulated figure from a published one."""


def commits(recipe: Recipe) -> list[str]:
    """Commits of the code that made the lines."""
    return list(dict.fromkeys(row.get("commit", recipe["commit"]) for row in recipe["rows"]))


def served(recipe: Recipe) -> list[Row]:
    """What placements serve, and how far that is from the published figure."""
    rows = [*recipe["rows"], *sums(recipe)]
    return [{**row, "off": _off(row), "planned": _planned(row)} for row in rows]


def _off(row: Row) -> float | None:
    figure = row["published_tokens_per_s"]
    return None if figure is None else row["tokens_per_s"] / figure - 1


def _planned(row: Row) -> str:
    return f" ({row['planned_s']:.0f} s)" if row.get("planned_s") else ""


def split(recipe: Recipe) -> list[Row]:
    """What each part of the rules brings, then the plan: factors on the line before."""
    rows, before = [], 0.0
    for row in recipe["rows"]:
        factor = None if row["rules"] == "helix" else row["tokens_per_s"] / before
        rows.append({**row, "factor": factor})
        before = row["tokens_per_s"]
    return rows


def sums(recipe: Recipe) -> list[Row]:
    """The clusters of one GPU type together, as Helix reports LLaMA 30B.

    Their prompts' mean time is by the sessions that each answers.
    """
    found: dict[tuple[str, str], list[Row]] = {}
    for row in recipe["rows"]:
        whole, _, part = row.get("cluster", "").partition("_sub_")
        if part:
            found.setdefault((whole, row["placement"]), []).append(row)
    known = published_sums()
    together = []
    for (whole, placement), rows in found.items():
        tokens_per_s = sum(row["tokens_per_s"] for row in rows)
        weighed_s = sum(row["prompt_s"] * row["tokens_per_s"] for row in rows)
        together.append(
            {
                **{name: rows[0][name] for name in ("model", "scheduler", "links", "mode")},
                "cluster": whole,
                "placement": f"{placement}, three replicas",
                "tokens_per_s": tokens_per_s,
                "prompt_s": weighed_s / tokens_per_s,
                "published_tokens_per_s": known.get(f"{whole}/{placement}"),
            }
        )
    return together


def molink(recipe: Recipe) -> list[Row]:
    """Policies side by side, one line for each setting."""

    def setting(row: Row) -> tuple[float, float, float]:
        return row["requests_per_s"], row["mbit"], round(row["delay_s"] * 1e3, 3)

    rows = []
    for (rate, mbit, delay_ms), group in groupby(sorted(recipe["rows"], key=setting), setting):
        by_policy = {row["policy"]: row for row in group}
        first, next_ = (
            min(by_policy, key=lambda policy: by_policy[policy][what])
            for what in ("ttft_mean_s", "tpot_mean_s")
        )
        rows.append(
            {
                **by_policy,
                "setting": f"{rate:g}, {mbit:g}, {delay_ms:g}",
                "floor": next(iter(by_policy.values()))["floor"],
                "best": first if first == next_ else f"TTFT {first}, TPOT {next_}",
                "lost": _lost(by_policy),
            }
        )
    return rows


def _lost(by_policy: dict[str, Row]) -> str | None:
    """In what ``anabranch`` is behind another policy with chunks or without, in words."""
    mine = by_policy.get("anabranch")
    theirs = [row for name, row in by_policy.items() if not name.startswith("anabranch")]
    behind = [
        what.upper()
        for what in ("ttft", "tpot")
        if mine is not None
        and any(row[f"{what}_mean_s"] < mine[f"{what}_mean_s"] for row in theirs)
    ]
    return f"**{', '.join(behind)}**" if behind else None


def dispatches(recipe: Recipe) -> list[Row]:
    """Lines of sessions that move, each by its dispatch alone."""
    return [{**row, "name": row["key"].split("/s, ")[-1]} for row in recipe["rows"]]


def moves_worth(recipe: Recipe) -> list[Row]:
    """P99 of prompts at each rate: with moves, and with both dispatches without them."""
    p99_s = {row["key"]: row["prompt_p99_s"] for row in recipe["rows"]}
    found = [
        {"rate": rate}
        | {how: p99_s.get(f"{rate:g}/s, {how}") for how in ("turns", "freest", "freest, moves")}
        for rate in sorted({row["requests_per_s"] for row in recipe["rows"]})
    ]
    return [row for row in found if None not in row.values()]


def verdict(recipes: Sequence[Recipe]) -> tuple[list[Row], list[Row]]:
    """Ours against the best that was published: under full load, and at the same arrivals.

    Prompts are compared where ours serves as many tokens/s as theirs does under full load.
    """
    points = [row for recipe in recipes if recipe["recipe"] == CURVE for row in recipe["rows"]]
    recipes = [recipe for recipe in recipes if recipe["recipe"] in COMPARED]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in compared(recipes):
        if "_sub_" not in row["cluster"]:
            groups.setdefault((f"{row['cluster']}/{row['model']}", row["mode"]), []).append(row)
    full, timed = [], []
    for (cluster, mode), group in groups.items():
        theirs = [r for r in group if r["placement"] != "ours" and r["scheduler"] != "anabranch"]
        mine = [r for r in group if r["placement"] == "ours" and r["scheduler"] == "anabranch"]
        if not theirs or not mine:
            continue
        if mode == "full load":
            here = [r for r in points if f"{r['cluster']}/{r['model']}" == cluster]
            full.append(_full(cluster, theirs, mine[0], here))
        else:
            timed += [_timed(cluster, mode, other, mine[0]) for other in theirs]
    return full, timed


def compared(recipes: Sequence[Recipe]) -> list[Row]:
    """The lines of the recipes that run both sides."""
    return [row for recipe in recipes for row in [*recipe["rows"], *sums(recipe)]]


def own_error(recipes: Sequence[Recipe]) -> dict[str, float]:
    """How far Helix's plans under its own scheduler are from what it published."""
    return {
        f"{row['cluster']}/{row['model']}": row["tokens_per_s"] / row["published_tokens_per_s"] - 1
        for row in compared(recipes)
        if row["mode"] == "full load"
        and row["placement"].split(",")[0] == row["scheduler"] == "helix"
        and row["published_tokens_per_s"]
    }


def least_speed(recipes: Sequence[Recipe]) -> float:
    """How many times real time the simulator runs at least, with up to 24 peers at full load."""
    return min(
        row["times_real"]
        for row in compared(recipes)
        if row["mode"] == "full load" and "24" in row["cluster"] and "times_real" in row
    )


def _full(cluster: str, theirs: Sequence[Row], mine: Row, points: Sequence[Row]) -> Row:
    best = max(theirs, key=lambda row: row["tokens_per_s"])
    wanted = WANTED.get(cluster, 1.0)
    ratio = mine["tokens_per_s"] / best["tokens_per_s"]
    as_many = [
        row
        for row in (*points, mine)
        if row["placement"] == "ours" and row["tokens_per_s"] >= best["tokens_per_s"]
    ]
    equal = min(as_many, key=lambda row: row["tokens_per_s"], default=mine)
    failed = ["fewer tokens/s than wanted"] * (ratio < wanted)
    failed += ["prompts are slower at their tokens/s"] * (equal["prompt_s"] >= best["prompt_s"])
    figures = {"cluster": cluster, "best": best, "mine": mine, "equal": equal}
    return {**figures, "ratio": ratio, "wanted": wanted, "said": _said(failed)}


def curve(recipe: Recipe) -> list[Row]:
    """A line for each load of a cluster, with Helix's plan and scheduler beside ours."""
    rows: dict[tuple[str, str, float], Row] = {}
    for row in recipe["rows"]:
        key = row["cluster"], row["model"], row["share"]
        rows.setdefault(key, {**row, "helix": {}, "ours": {}})[row["placement"]] = row
    return list(rows.values())


def _timed(cluster: str, mode: str, other: Row, mine: Row) -> Row:
    failed = [
        f"higher {kind} {percent.upper()}"
        for kind in ("prompt", "token")
        for percent in ("p50", "p99")
        if mine[f"{kind}_{percent}_s"] >= other[f"{kind}_{percent}_s"]
    ]
    figures = {"cluster": cluster, "mode": mode, "other": other, "mine": mine}
    return {**figures, "said": _said(failed)}


def _said(failed: Sequence[str]) -> str:
    return f"**we lose**: {', '.join(failed)}" if failed else "holds"
