"""docs/results.md out of the recipes' JSON files."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.papers import report_own as own_tables
from bench.papers import report_tables as tables
from bench.papers.report_verdict import FAITHFUL, verdict
from bench.report import table

Recipe = dict[str, Any]

HEAD = """# Results on paper

Made by `python -m bench.papers` from `bench/results/papers/*.json`; do not edit. Everything here is
simulated, none of it was measured on GPUs. Helix's clusters come with layer times that its authors
measured; requests come from the Azure conversation trace of 2023; seed 0.

How to read it:

- *Full load*: 60 s of warm-up, 600 s measured, requests without end. *At their own times*: the same
  arrivals for everybody, 1800 s, run until all are answered.
- Tokens/s are decoded tokens. A prompt's time is from its arrival to its end at the clients (under
  full load: from when it was let in); a token's from the one before.
- Schedulers: `helix` (IWRR), `swarm`, `random` and `shortest-queue` are the papers' rules, with
  whole prompts and links in order; `anabranch` is a living swarm: the peers' own batches, chunks,
  admission, routes and ring. Links: `in-order` sends whole pieces as Helix's simulator does;
  `framed` is the closed form of this project's link scheduler (decodes overtake prompts). Lines
  of a living swarm at commit `b7a291e8` let in as many prompts as there was KV for, which waited up
  to minutes under full load; since then no more are let in than end within about 10 s.
- Placement `ours` is what the planner found in the seconds named, out of
  `bench/results/placement.json` (`python -m bench planner.placement`); Helix's were found in up to
  4 hours.
"""

NOTES = """## What differs from the papers, and what is left out

- A placement has many maximum flows; on clusters with slow links the choice among them moves the
  result by about a quarter. The runs with Helix's plans use networkx's flow over the plan's links,
  as Helix does, but our graph may list them in another order than its run did. The plans of the
  ablation come without their links; there all that the placement allows may carry flow, and what
  they serve is not comparable with the published figure beside it.
- Swarm's, random's and shortest queue's routes are drawn when a request arrives, not hop by hop.
- Online arrivals are drawn by Helix's method from the same trace, but not its exact draws: its
  three-second counts start at another instant.
- The pipelines for LLaMA 70B by GPU type hold more layers than the profiles have; not run.
- Chunks of a prompt take the time that the profile gives for so many tokens, and no less than a
  step of two decodes, which reads the same weights; reading the KV of the chunks before is not in
  Helix's profiles, so chunked runs flatter long prompts somewhat.
- By the papers' rules tokens return through the clients' host, as in Helix; in a living swarm the
  ring closes directly.
- A link's closed form is held against the link scheduler, slice by slice, by a test: within 5% in
  the time of a prompt and of a token. A peer's own uplink is shared by its links; its downlink
  bounds each of them.
- A session takes pages at all its stages when its token has gone round, not stage by stage; records
  are never late; one that gives way is replayed over a whole route.
- Sections name the commits of their lines: where they differ, so do plans (`ours` is the newest one
  recorded then) and chunks (256 tokens before `a548162`).
- Llumnix's local scheduler runs urgent requests first and leaves others' steps out; here priority
  is only in the line and in the headroom; real stages run urgent work first, within bounds.
"""

SECTIONS: dict[str, Callable[[Recipe], Sequence[str]]] = {
    "helix-offline-70b": tables.served,
    "helix-offline-30b": tables.served,
    "helix-split": tables.split,
    "helix-online-70b": tables.served,
    "helix-schedulers": tables.served,
    "helix-ablation": tables.served,
    "search": tables.search,
    "molink": tables.molink,
    "molink-links": tables.molink,
    "change": tables.change,
    "volunteers": own_tables.volunteers,
    "crowd": own_tables.crowd,
    "cut-off": own_tables.cut_off,
    "growth": own_tables.growth,
    "llumnix": own_tables.llumnix,
}
COMPARED = ("helix-offline-70b", "helix-offline-30b", "helix-online-70b")


def write(results: Path, names: Sequence[str], target: Path) -> None:
    """Write the document from whatever results there are."""
    found = {
        name: json.loads((results / f"{name}.json").read_text())
        for name in names
        if (results / f"{name}.json").exists()
    }
    parts = [
        HEAD,
        _cost(tuple(found.values())),
        verdict([found[name] for name in COMPARED if name in found]),
    ]
    parts += [_section(recipe) for recipe in found.values()]
    faithful = results.parent / "faithful.json"
    if faithful.exists():
        parts.append(_faithful(json.loads(faithful.read_text())))
    missing = [name for name in names if name not in found]
    if missing:
        parts.append(f"Not run yet: {', '.join(missing)}.\n")
    parts.append(NOTES)
    target.write_text("\n".join(parts))


KINDS = ("real", "simulated", "error")
FIGURES = {
    "tokens_per_s": "tokens/s",
    "ttft_mean_s": "TTFT mean, s",
    "ttft_p95_s": "TTFT P95, s",
    "tpot_mean_s": "TPOT mean, s",
}


def _faithful(result: dict[str, Any]) -> str:
    """The simulator beside real processes on one machine."""
    lone = result["lone"]
    lines = [
        "## The simulator beside real processes",
        "",
        f"`python -m bench.planner.faithful` — commit {result['commit']} ({result['cpu']},"
        f" {result['cores']} cores).",
        "",
        "Two peers of half a model each and a client, all processes of one machine; the simulator"
        " knows the stages' step times, measured apart, and from a lone answer what a message takes"
        f" ({lone['hop_s'] * 1e3:.1f} ms) and what opening takes ({lone['open_s'] * 1e3:.1f} ms)."
        " Nothing is fitted to the runs compared. The goal is 5%.",
        "",
        table(
            "load | | real: | simulated: | error:",
            "{share:.0%} of the slower stage, {requests_per_s:.2f}/s | {title}"
            " | {real:.4g} | {simulated:.4g} | {error:+.1%}",
            [
                {**load, "title": title, **{kind: load[kind][name] for kind in KINDS}}
                for load in result["loads"]
                for name, title in FIGURES.items()
            ],
        ),
    ]
    worst = max(abs(load["error"][name]) for load in result["loads"] for name in FIGURES)
    met = "reached" if worst <= FAITHFUL else "**missed**"
    lines += [
        "",
        f"The goal is {met}: the largest error is {worst:.1%}. Three busy processes share"
        f" {result['cores']} cores here, which the simulator does not know.",
        "",
    ]
    return "\n".join(lines)


def _cost(recipes: Sequence[Recipe]) -> str:
    """What all of it takes."""
    total_s = sum(recipe["took_s"] for recipe in recipes)
    longest = max((row["took_s"] for recipe in recipes for row in recipe["rows"]), default=0.0)
    minutes = max(total_s / 2, longest) / 60
    return (
        f"All lines together took {total_s:.0f} s of one core, the longest {longest:.0f} s (each"
        " measures its own CPU time); `python -m bench.papers --processes 2` shares them between"
        f" two cores, so the whole document takes about {minutes:.0f} minutes."
        " This is a sum, not the time of one run: lines were made as the code changed.\n"
    )


def _section(recipe: Recipe) -> str:
    state = "" if recipe["complete"] else "; **stopped before its end**"
    lines = [
        f"## {recipe['title']}",
        "",
        f"`{recipe['command']}` — commit {_commits(recipe)}, {recipe['took_s']:.0f} s of one core"
        f" ({recipe['cpu']}){state}.",
        "",
        *SECTIONS[recipe["recipe"]](recipe),
    ]
    return "\n".join(lines) + "\n"


def _commits(recipe: Recipe) -> str:
    """Commits of the code that made the lines."""
    return ", ".join(dict.fromkeys(r.get("commit", recipe["commit"]) for r in recipe["rows"]))
