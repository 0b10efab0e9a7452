"""Writes the tables of README.md and docs/measurements.md from ``bench/results``: no figure is
typed by hand.

``python -m bench.results_table`` replaces what stands between the two markers of each document. A
result that nobody has made yet is left out.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from bench.results_attacks import attacks
from bench.results_engine import beside_llama_cpp, cost, engine, real_sizes, schemas, speed
from bench.results_gpu import gpu, gpu_h200, gpu_packed
from bench.results_links import (
    links,
    measured_links,
)
from bench.results_planner import (
    elections,
    light_load,
    live_plans,
    placements,
    planner_parts,
    roaming,
    sizes,
)
from bench.results_sessions import (
    chaos,
    fleet,
    full_load,
    losses,
    moves,
    overload,
    prefix,
    storms,
)
from bench.results_short import gpus
from bench.results_speculation import draft_model, speculation
from bench.results_stale import warning
from testing.local_swarm import ROOT

RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- figures: python -m bench.results_table -->", "<!-- end of figures -->"


def read(name: str) -> dict[str, Any]:
    """One result file."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


DOCUMENTS: dict[str, dict[str, Callable[[dict[str, Any]], str]]] = {
    "README.md": {
        "gpu_fit": gpus,
    },
    "docs/measurements.md": {
        "local": speed,
        "footprint": cost,
        "losses": losses,
        "chaos": chaos,
        "elections": elections,
        "overload": overload,
        "overload_ablated": full_load,
        "storm": storms,
        "moves": moves,
        "placement": placements,
        "engine": engine,
        "engine_processor": engine,
        "real_sizes": real_sizes,
        "llama_cpp": beside_llama_cpp,
        "gpu_check": gpu,
        "gpu_check_h200": gpu_h200,
        "gpu_packed": gpu_packed,
        "papers/molink": links,
        "speculation": speculation,
        "draft_model": draft_model,
        "prefix": prefix,
        "schemas": schemas,
        "links": measured_links,
        "live_plan": live_plans,
        "planner_parts": planner_parts,
        "placement_sizes": sizes,
        "light_load": light_load,
        "fleet_12": fleet,
        "fleet_24": fleet,
        "fleet_40": fleet,
        "roaming": roaming,
        "hostile": attacks,
    },
}
"""Which figures stand where, in this order."""
TITLES = {
    "local": "## One machine beside one process\n\n",
    "losses": "## Volunteers that vanish\n\n",
    "overload": "## Overload\n\n",
    "storm": "## Storms\n\n",
    "moves": "## Planned moves\n\n",
    "placement": "## Placements, on paper\n\n",
    "engine": "## The engine\n\n",
    "papers/molink": "## Links, on paper\n\n",
    "speculation": "## Drafts around the ring\n\n",
    "prefix": "## What stages keep\n\n",
    "schemas": "## Answers in JSON\n\n",
    "links": "## What a swarm knows of its links\n\n",
    "live_plan": "## The plan that lives\n\n",
    "placement_sizes": "## Planning more and more peers\n\n",
    "light_load": "## One person's tokens\n\n",
    "fleet_12": "## A dozen and more real peers\n\n",
    "roaming": "## Volunteers of many models\n\n",
    "hostile": "## Attacks\n\n",
}


def from_(document: str, text: str) -> str:
    """``text`` with its links, which start at the root, as they must be in ``document``."""
    if not document.startswith("docs/"):
        return text
    return text.replace("](bench/", "](../bench/").replace("](docs/", "](")


def recorded() -> dict[str, dict[str, Any]]:
    """Every result file by its name."""
    return {
        str(path.relative_to(RESULTS).with_suffix("")): json.loads(path.read_text())
        for path in sorted(RESULTS.rglob("*.json"))
    }


def main() -> int:
    for document, parts in DOCUMENTS.items():
        path = ROOT / document
        before, rest = path.read_text().split(BEGIN)
        _, after = rest.split(END)
        titles = TITLES if document.startswith("docs/") else {}
        texts = [
            titles.get(name, "") + from_(document, write(read(name)))
            for name, write in parts.items()
            if (RESULTS / f"{name}.json").exists()
        ]
        if titles:
            texts.append(warning(recorded()))
        path.write_text(f"{before}{BEGIN}\n\n" + "\n\n".join(texts) + f"\n\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
