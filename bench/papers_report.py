"""docs/results.md out of the recipes' JSON files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HEAD = """# Simulated results

Made by `python -m bench.papers` from `bench/results/papers/*.json`; do not edit. Everything here is
simulated (`coordinator/simulator`), on Helix's clusters with its measured layer times, the Azure
conversation trace of 2023 and seed 0: 60 s of warm-up and 600 s measured offline, 1800 s online.
Tokens/s are decoded tokens; a prompt's time is from its arrival to its end at the clients, a
token's from the one before.

Schedulers: `helix`, `swarm`, `random` are the papers' rules; `anabranch` is this project's router
with a line in front of it. Links: `in-order` sends whole pieces as Helix's simulator does; `framed`
is the closed form of this project's link scheduler (decodes overtake prompts), with prompts in
chunks of 256 tokens where the scheduler is `anabranch`.
"""

NOTES = """## What differs from Helix's simulator, and what is left out

- A placement has many maximum flows; on clusters with slow links the choice among them moves the
  result by about a quarter. The runs with Helix's plans use networkx's flow over the plan's links,
  as Helix does, but our graph may list them in another order than its run did.
- Swarm's and random's routes are drawn when a request arrives, not hop by hop.
- Online arrivals are drawn by Helix's method from the same trace, but not its exact draws: its
  three-second counts start at another instant.
- The pipelines for LLaMA 70B by GPU type hold more layers than the profiles have; not run.
- Chunks of a prompt take the time that the profile gives for so many tokens; reading the KV of the
  chunks before is not in Helix's profiles, so chunked runs flatter long prompts somewhat.
- Tokens return through the clients' host in all runs, as in Helix; a real ring closes directly.
- The link scheduler's start-up and credits are not in the closed form; frame by frame (links
  `anabranch`) the difference was under 5% where both were run (tests).
"""


def write_report(results: Path, target: Path) -> None:
    """Write the document from whatever results there are."""
    parts = [HEAD]
    recipes = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    parts += [_section(recipe) for recipe in recipes]
    parts.append(_verdict([r for recipe in recipes for r in [*recipe["rows"], *_sums(recipe)]]))
    parts.append(NOTES)
    target.write_text("\n".join(parts))


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _section(recipe: dict[str, Any]) -> str:
    lines = [
        f"## {recipe['title']}",
        "",
        f"`{recipe['command']}` — commit {recipe['commit']}, {recipe['wall_s']:.0f} s on"
        f" {recipe['cores']} cores{'' if recipe['complete'] else '; stopped before its end'}.",
        "",
        "| cluster | placement | scheduler | links | load | published tokens/s | simulated |"
        " difference | prompt s, mean / P50 / P99 | token s, mean / P50 / P99 | KV peak |",
        "|---|---|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in [*recipe["rows"], *_sums(recipe)]:
        figure = row["published_tokens_per_s"]
        off = "–" if figure is None else f"{row['tokens_per_s'] / figure - 1:+.1%}"
        times = [
            " / ".join(_number(row.get(f"{kind}{suffix}_s"), 2) for suffix in ("", "_p50", "_p99"))
            for kind in ("prompt", "token")
        ]
        lines.append(
            f"| {row['cluster']}/{row['model']} | {row['placement']} | {row['scheduler']} |"
            f" {row['links']} | {row['mode']} | {_number(figure)} |"
            f" {row['tokens_per_s']:.1f} | {off} | {times[0]} | {times[1]} |"
            f" {_number(row.get('kv_peak'), 2)} |"
        )
    return "\n".join(lines) + "\n"


def _sums(recipe: dict[str, Any]) -> list[dict[str, Any]]:
    """The clusters of one GPU type together, as Helix reports LLaMA 30B."""
    sums: dict[tuple[str, str], dict[str, Any]] = {}
    for row in recipe["rows"]:
        whole, _, part = row["cluster"].partition("_sub_")
        if not part:
            continue
        key = whole, row["placement"]
        if key not in sums:
            sums[key] = {
                "cluster": whole,
                "model": row["model"],
                "placement": f"{row['placement']}, three replicas",
                "scheduler": row["scheduler"],
                "links": row["links"],
                "mode": row["mode"],
                "tokens_per_s": 0.0,
                "published_tokens_per_s": recipe["published_sums"].get("/".join(key)),
            }
        sums[key]["tokens_per_s"] += row["tokens_per_s"]
    return list(sums.values())


def _verdict(rows: Sequence[dict[str, Any]]) -> str:
    """Ours against the best that was published, cluster by cluster."""
    lines = [
        "## Ours against the best published",
        "",
        "| cluster | load | best published, simulated here | ours | ratio |"
        " prompt s, theirs / ours | verdict |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if "_sub_" not in row["cluster"]:
            groups.setdefault((row["cluster"], row["model"], row["mode"]), []).append(row)
    for (cluster, model, mode), group in groups.items():
        theirs = [r for r in group if r["placement"] != "ours" and r["scheduler"] != "anabranch"]
        mine = [r for r in group if r["placement"] == "ours" and r["scheduler"] == "anabranch"]
        if not theirs or not mine:
            continue
        best = max(theirs, key=lambda r: r["tokens_per_s"])
        own = max(mine, key=lambda r: r["tokens_per_s"])
        ratio = own["tokens_per_s"] / best["tokens_per_s"]
        if mode.startswith("online"):  # both serve what arrives; latency tells
            won = own["prompt_p99_s"] < best["prompt_p99_s"]
            verdict = "lower latency" if won else "**we lose**: higher P99 of prompts"
        else:
            verdict = "more" if ratio >= 1 else "**we lose**"
        lines.append(
            f"| {cluster}/{model} | {mode} | {best['tokens_per_s']:.1f} ({best['placement']},"
            f" {best['scheduler']}) | {own['tokens_per_s']:.1f} | {ratio:.2f} |"
            f" {_number(best.get('prompt_s'), 2)} / {_number(own.get('prompt_s'), 2)} |"
            f" {verdict} |"
        )
    return "\n".join(lines) + "\n"
