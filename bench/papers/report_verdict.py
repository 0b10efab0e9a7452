"""Ours against the best that was published, cluster by cluster: what holds and what does not."""

from collections.abc import Sequence
from typing import Any

from bench.papers.report_tables import sums
from bench.report import table

Row = dict[str, Any]

WANTED = {"single24/70b": 1.10, "geo24/70b": 1.6, "het42/70b": 1.10}
"""How many times the best published tokens/s is asked for; 1 elsewhere."""

FAITHFUL = 0.05


def verdict(recipes: Sequence[dict[str, Any]]) -> str:
    """The section, out of the recipes that run both sides."""
    rows = [row for recipe in recipes for row in [*recipe["rows"], *sums(recipe)]]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if "_sub_" not in row["cluster"]:
            groups.setdefault((f"{row['cluster']}/{row['model']}", row["mode"]), []).append(row)
    full, timed = [], []
    for (cluster, mode), group in groups.items():
        theirs = [r for r in group if r["placement"] != "ours" and r["scheduler"] != "anabranch"]
        mine = [r for r in group if r["placement"] == "ours" and r["scheduler"] == "anabranch"]
        if not theirs or not mine:
            continue
        if mode == "full load":
            full.append(_full(cluster, theirs, mine[0]))
        else:
            timed += [_timed(cluster, mode, other, mine[0]) for other in theirs]
    lines = [
        "## Ours against the best published",
        "",
        "Under full load, beside the published plan and scheduler that serve the most here"
        " (every published figure is in the tables below):",
        "",
        table(
            "cluster | best published, simulated here: | its published figure: | ours: | ratio: |"
            " wanted: | mean prompt, theirs → ours: | verdict",
            "{cluster} | {best[tokens_per_s]:.1f} ({best[placement]}, {best[scheduler]})"
            " | {best[published_tokens_per_s]:.1f} | {mine[tokens_per_s]:.1f} | {ratio:.2f}"
            " | {wanted:.2f} | {best[prompt_s]:.2f} → {mine[prompt_s]:.2f} s | {said}",
            full,
        ),
        "",
        "At the same arrivals (seconds, P50 / P99):",
        "",
        table(
            "cluster | load | beside | prompt, theirs: | prompt, ours: | token, theirs: |"
            " token, ours: | verdict",
            "{cluster} | {mode} | {other[placement]}, {other[scheduler]}"
            " | {other[prompt_p50_s]:.2f} / {other[prompt_p99_s]:.2f}"
            " | {mine[prompt_p50_s]:.2f} / {mine[prompt_p99_s]:.2f}"
            " | {other[token_p50_s]:.2f} / {other[token_p99_s]:.2f}"
            " | {mine[token_p50_s]:.2f} / {mine[token_p99_s]:.2f} | {said}",
            timed,
        ),
        "",
        *_trust(rows),
    ]
    return "\n".join(lines)


def _trust(rows: Sequence[Row]) -> list[str]:
    """How near the simulator comes to Helix's, and how fast it is."""
    full = [row for row in rows if row["mode"] == "full load"]
    own = {
        f"{row['cluster']}/{row['model']}": row["tokens_per_s"] / row["published_tokens_per_s"] - 1
        for row in full
        if row["placement"].split(",")[0] == "helix"
        and row["scheduler"] == "helix"
        and row["published_tokens_per_s"]
    }
    lines = []
    if own:
        said = ", ".join(f"{case} {off:+.1%}" for case, off in own.items())
        worst = max(abs(off) for off in own.values())
        lines += [
            f"Helix's plans under its own scheduler, beside what it published: {said}"
            f" ({'all' if worst <= FAITHFUL else '**not all**'} within {FAITHFUL:.0%}).",
            "",
        ]
    speeds = [row["times_real"] for row in full if "24" in row["cluster"] and "times_real" in row]
    if speeds:
        lines += [
            f"Speed on clusters of up to 24 peers under full load, on one core: at the least"
            f" {min(speeds):.0f} × real time.",
            "",
        ]
    return lines


def _full(cluster: str, theirs: Sequence[Row], mine: Row) -> Row:
    best = max(theirs, key=lambda r: r["tokens_per_s"])
    wanted = WANTED.get(cluster, 1.0)
    ratio = mine["tokens_per_s"] / best["tokens_per_s"]
    failed = []
    if ratio < wanted:
        failed.append("fewer tokens/s than wanted")
    if mine["prompt_s"] >= best["prompt_s"]:
        failed.append("prompts are slower")
    figures = {"cluster": cluster, "best": best, "mine": mine, "ratio": ratio, "wanted": wanted}
    return {**figures, "said": _said(failed)}


def _timed(cluster: str, mode: str, other: Row, mine: Row) -> Row:
    failed = [
        f"{kind} {percent.upper()}"
        for kind in ("prompt", "token")
        for percent in ("p50", "p99")
        if mine[f"{kind}_{percent}_s"] >= other[f"{kind}_{percent}_s"]
    ]
    said = _said([f"higher {what}" for what in failed])
    return {"cluster": cluster, "mode": mode, "other": other, "mine": mine, "said": said}


def _said(failed: Sequence[str]) -> str:
    return f"**we lose**: {', '.join(failed)}" if failed else "holds"
