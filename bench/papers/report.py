"""docs/results.md out of the recipes' JSON files."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.papers import report_own as own_tables
from bench.papers import report_tables as tables
from bench.papers.report_verdict import verdict

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
- Schedulers: `helix` (IWRR), `swarm`, `random` and `shortest-queue` are the papers' rules;
  `anabranch` is this project's router with a line in front of it. Links: `in-order` sends whole
  pieces as Helix's simulator does; `framed` is the closed form of this project's link scheduler
  (decodes overtake prompts), with prompts in chunks of 256 tokens where the scheduler is
  `anabranch`.
- Placement `ours` is what the planner found in the seconds named, out of
  `bench/results/placement.json` (`python -m bench.placement`); Helix's were found in up to 4 hours.
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
- Chunks of a prompt take the time that the profile gives for so many tokens; reading the KV of the
  chunks before is not in Helix's profiles, so chunked runs flatter long prompts somewhat.
- Tokens return through the clients' host in all runs, as in Helix; a real ring closes directly.
- The link scheduler's start-up and credits are not in the closed form; frame by frame (links
  `anabranch`) the difference was under 5% where both were run (tests).
- LLaMA 30B on geo24: most prompts of Helix's three replicas are answered by the A100s, which share
  one region (0.4 s); ours is one flow over all regions. It decodes more and starts later.
- Llumnix's experiments are not here: the simulator moves no session for balance or priority.
"""

SECTIONS: dict[str, Callable[[Recipe], Sequence[str]]] = {
    "helix-offline-70b": tables.served,
    "helix-offline-30b": tables.served,
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
}
COMPARED = ("helix-offline-70b", "helix-offline-30b", "helix-online-70b")


def write(results: Path, names: Sequence[str], target: Path) -> None:
    """Write the document from whatever results there are."""
    found = {
        name: json.loads((results / f"{name}.json").read_text())
        for name in names
        if (results / f"{name}.json").exists()
    }
    parts = [HEAD, verdict([found[name] for name in COMPARED if name in found])]
    parts += [_section(recipe) for recipe in found.values()]
    missing = [name for name in names if name not in found]
    if missing:
        parts.append(f"Not run yet: {', '.join(missing)}.\n")
    parts.append(NOTES)
    target.write_text("\n".join(parts))


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
    """Of the code that made the lines."""
    return ", ".join(dict.fromkeys(r.get("commit", recipe["commit"]) for r in recipe["rows"]))
