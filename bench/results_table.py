"""Writes the tables of README.md and docs/measurements.md from ``bench/results``: no figure is
typed by hand.

``python -m bench.results_table`` replaces what stands between the two markers of each document. A
result that nobody has made yet is left out.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from bench.local_swarm import ROOT
from bench.results_attacks import attacks, grants
from bench.results_engine import beside_llama_cpp, cost, engine, real_sizes, schemas, speed
from bench.results_gpu import gpu, gpu_h200, gpu_packed
from bench.results_links import (
    groups,
    hop,
    int8,
    light_hop,
    links,
    measured_links,
    real_links,
)
from bench.results_planner import (
    crowds,
    elections,
    flood,
    light_load,
    live_plans,
    placements,
    planner_parts,
    roaming,
    sizes,
)
from bench.results_sessions import (
    balance,
    chaos,
    fleet,
    full_load,
    healing,
    kv,
    losses,
    moves,
    moves_apart,
    moves_between_processes,
    overload,
    prefix,
    storms,
)
from bench.results_short import gpus
from bench.results_speculation import draft_model, speculation
from bench.results_stale import warning

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
        "moves_virtual": moves_apart,
        "moves_real": moves_between_processes,
        "placement": placements,
        "engine": engine,
        "engine_processor": engine,
        "real_sizes": real_sizes,
        "llama_cpp": beside_llama_cpp,
        "gpu_check": gpu,
        "gpu_check_h200": gpu_h200,
        "gpu_packed": gpu_packed,
        "papers/molink": links,
        "wan_real": real_links,
        "speculation": speculation,
        "draft_model": draft_model,
        "wan_groups": groups,
        "balance_virtual": balance,
        "kv": kv,
        "prefix": prefix,
        "schemas": schemas,
        "int8": int8,
        "links": measured_links,
        "transport": hop,
        "light_transport": light_hop,
        "live_plan": live_plans,
        "planner_parts": planner_parts,
        "placement_sizes": sizes,
        "light_load": light_load,
        "routes": crowds,
        "dht_flood": flood,
        "fleet_12": fleet,
        "fleet_24": fleet,
        "fleet_40": fleet,
        "healing": healing,
        "roaming": roaming,
        "hostile": attacks,
        "grants": grants,
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
    "wan_real": "## Links, between real processes\n\n",
    "speculation": "## Drafts around the ring\n\n",
    "wan_groups": "## Micro-batches\n\n",
    "balance_virtual": "## Moves for balance\n\n",
    "kv": "## KV that grows\n\n",
    "prefix": "## What stages keep\n\n",
    "schemas": "## Answers in JSON\n\n",
    "int8": "## Rows of 8 bits\n\n",
    "links": "## What a swarm knows of its links\n\n",
    "transport": "## A hop\n\n",
    "light_transport": "## A hop without the daemon\n\n",
    "live_plan": "## The plan that lives\n\n",
    "placement_sizes": "## Planning more and more peers\n\n",
    "light_load": "## One person's tokens\n\n",
    "routes": "## Routes of many clients\n\n",
    "dht_flood": "## A flood of records\n\n",
    "fleet_12": "## A dozen and more real peers\n\n",
    "healing": "## Swarms that were cut\n\n",
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
