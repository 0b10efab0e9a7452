"""What one person waits for a token while others ask little, and
what the rule for that costs when all ask.

Simulated by the living rules, on clusters of volunteers' homes that nobody tuned on, Helix's, and
made ones: a coordinator's first plan from what peers announce serves requests that come at random,
at shares of what it serves at full load. Routes are drawn as clients do, with the quickest ring
while peers have little to do (:mod:`coordinator.policies.routing.quickest`), and in turn alone.
Clients know at once how many sessions each peer has; living ones read of others' some seconds
later, so that a burst of new clients is worse off than here.

Rows are added to the output; those that it has already are kept.
"""

import statistics
import sys
from collections.abc import Sequence
from typing import Any

from bench.papers.arrivals import poisson
from bench.papers.clusters import azure
from bench.planner import cluster_rows
from bench.planner.clusters import HELD_OUT
from bench.planner.live_plan import NAMED, case, solved
from coordinator.commands.full_load import LIVING, OnlineConfig, Rules, online
from coordinator.runtime import CoordinatorConfig
from coordinator.simulator.judge import standing_load
from testing.local_swarm import ROOT

RESULT = ROOT / "bench" / "results" / "light_load.json"
WAYS = {"quickest": LIVING, "in turn": Rules(scheduler="in-turn")}
SHARES = (0.02, 0.3, 0.7)
"""Loads, as parts of the tokens/s at full load."""
FULL_S = 240.0
"""Length of a replay at full load; its second half counts."""
REQUESTS, AT_LEAST_S, WARM_UP_S = 150, 600.0, 60.0
"""Requests that come while it is measured, about, and the least time, in seconds."""


def row(name: str) -> dict[str, Any]:
    """One cluster: both ways of drawing routes at full load and at each share of it."""
    each = case(name)
    found, _ = solved(each.known, CoordinatorConfig().solve_s)
    assert found.best is not None, found.error
    full = {
        way: standing_load(
            each.problem,
            each.profiles,
            found.best,
            azure(),
            virtual_s=FULL_S,
            in_turn=WAYS[way] is not LIVING,
        )
        for way in WAYS
    }
    lengths = statistics.fmean(request.output_tokens for request in azure())
    loads = {}
    for share in SHARES:
        per_s = share * full["in turn"] / lengths
        lasts_s = max(AT_LEAST_S, REQUESTS / per_s)
        arrivals = poisson(azure(), per_s=per_s, duration_s=WARM_UP_S + lasts_s, seed=1)
        loads[str(share)] = {
            way: _times(
                online(
                    each.problem,
                    each.profiles,
                    found.best,
                    arrivals,
                    OnlineConfig(warm_up_s=WARM_UP_S, measured_s=lasts_s, rules=rules),
                )
            )
            for way, rules in WAYS.items()
        }
    return {"cluster": name, "peers": len(each.problem.nodes), "full": full, "loads": loads}


def _times(measured: Any) -> dict[str, float]:
    return {
        "prompt_s": measured.prompt.mean_s,
        "token_s": measured.decode.mean_s,
        "token_p95_s": measured.decode.percentiles_s[95],
        "sessions": measured.sessions_live,
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of the quickest to in turn: times per token and to the first, and tokens/s when full.
    A ratio below 1 is quicker; at full load, above 1 is more."""
    full = [r["full"]["quickest"] / r["full"]["in turn"] for r in rows]
    found: dict[str, Any] = {"full": cluster_rows.spread(full)}
    for share in map(str, SHARES):
        for what in ("token_s", "token_p95_s", "prompt_s"):
            ratios = [
                r["loads"][share]["quickest"][what] / max(1e-9, r["loads"][share]["in turn"][what])
                for r in rows
            ]
            found[f"{what} at {share}"] = cluster_rows.spread(ratios)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    return cluster_rows.run(
        "bench.planner.light_load",
        __doc__,
        RESULT,
        (*NAMED, *HELD_OUT),
        row,
        summary,
        argv,
        in_order=sorted,
    )


if __name__ == "__main__":
    sys.exit(main())
