"""The papers' experiments as named recipes, each with the paper's figure beside ours.

``python -m bench.papers`` runs all of them, writes ``bench/results/papers/<recipe>.json`` and makes
``docs/results.md``; ``python -m bench.papers helix-offline-70b …`` runs some;
``python -m bench.papers --list`` says what there is.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench.papers_report import write_report
from coordinator.flow import follows
from coordinator.placement import Placement, best_placement
from coordinator.simulator import (
    OfflineConfig,
    OnlineConfig,
    Profiles,
    Request,
    SimulationReport,
    as_in_papers,
    offline,
    online,
    read_trace,
)
from coordinator.simulator.helix_flow import helix_plan
from coordinator.simulator.planning import service_of
from coordinator.simulator.swarm_file import read_swarm
from coordinator.simulator.trace import resampled
from dht.types import SINK, SOURCE, Assignment, Plan, Problem

DATA = Path(__file__).parent / "data"
RESULTS = Path(__file__).parent / "results" / "papers"
REFERENCE = DATA / "helix" / "reference.json"
LINKS = DATA / "helix" / "published_links.json"
AZURE = DATA / "azure" / "conversations_2023.csv"
PLAN_S = 20.0
CHUNK_TOKENS = 256

Case = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table: what was run, the published figure, and ours."""

    cluster: str
    model: str
    mode: str
    placement: str
    scheduler: str
    links: str
    published_tokens_per_s: float | None
    tokens_per_s: float
    prompt_s: float
    prompt_p50_s: float
    prompt_p99_s: float
    token_s: float
    token_p50_s: float
    token_p99_s: float
    kv_peak: float
    times_real: float
    source: str = ""


def cluster_path(cluster: str) -> Path:
    """The file of one of Helix's clusters."""
    return DATA / "helix" / "clusters" / f"{cluster}.json"


@cache
def azure() -> tuple[Request, ...]:
    """The trace, as Helix and MoLink use it."""
    return as_in_papers(read_trace(AZURE.read_bytes()))


@cache
def reference() -> dict[str, Any]:
    """What Helix published."""
    found: dict[str, Any] = json.loads(REFERENCE.read_text())
    return found


def published(case: str) -> tuple[Problem, Profiles, Plan]:
    """A placement that Helix published (``cluster/model/placement``), with Helix's own flow."""
    cluster, model, placement = case.split("/")
    problem, profiles = read_swarm(cluster_path(cluster), model)
    spans = reference()["max_flow_shipped"][case]["placement"]
    assignments = [
        Assignment(peer_id=node.peer_id, start=start, end=end)
        for node, (start, end) in zip(problem.nodes, spans, strict=True)
    ]
    if placement == "sp":
        pairs = [(a.peer_id, b.peer_id) for a in assignments for b in assignments if follows(a, b)]
        pairs += [(SOURCE, a.peer_id) for a in assignments if a.start == 0]
        pairs += [(a.peer_id, SINK) for a in assignments if a.end == problem.model.layers]
    else:
        pairs = [
            (
                SOURCE if tail == "coordinator" else str(tail),
                SINK if head == "coordinator" else str(head),
            )
            for tail, head in json.loads(LINKS.read_text())["links"][case]
        ]
    return problem, profiles, helix_plan(problem, profiles, assignments, pairs)


def ours(cluster: str, model: str) -> tuple[Problem, Profiles, Placement]:
    """The project's planner's placement, searched for 20 seconds."""
    problem, profiles = read_swarm(cluster_path(cluster), model)
    started_s = time.monotonic()
    placement = best_placement(
        problem,
        time_limit_s=PLAN_S,
        seed=0,
        spent=lambda: (time.monotonic() - started_s) / PLAN_S,
        service=service_of(problem, profiles),
    )
    return problem, profiles, placement


def _readme(part: str) -> float | None:
    """The decode throughput that the artifact's README announces for a command of a section."""
    section, command = part.split(": ")
    for entry in reference()["expected_results_readme"]:
        if section in entry["section"] and entry["command"].endswith(command):
            return float(entry["decode_tps"])
    return None


def _artifact(case: str) -> float | None:
    """What Helix's simulator prints for one of its cases."""
    for run in reference()["artifact_simulator_runs"]:
        if run["case"] == case:
            return float(run["decode_tps"])
    return None


def row(report: SimulationReport, took_s: float, **what: Any) -> Row:
    """A line of a table out of a report."""
    return Row(
        tokens_per_s=report.decode_tokens_per_s,
        prompt_s=report.prompt.mean_s,
        prompt_p50_s=report.prompt.percentiles_s[50],
        prompt_p99_s=report.prompt.percentiles_s[99],
        token_s=report.decode.mean_s,
        token_p50_s=report.decode.percentiles_s[50],
        token_p99_s=report.decode.percentiles_s[99],
        kv_peak=max((use.kv_peak for use in report.peers.values()), default=0.0),
        times_real=report.simulated_s / max(took_s, 1e-9),
        **what,
    )


def run_offline(
    cluster: str,
    model: str,
    placement: str,
    scheduler: str,
    links: str,
    figure: float | None,
    source: str,
    sessions: int = 180,
) -> Row:
    """One offline run of a published placement or of ours."""
    if placement == "ours":
        found: tuple[Problem, Profiles, Plan | Placement] = ours(cluster, model)
    else:
        found = published(f"{cluster}/{model}/{placement}")
    config = OfflineConfig(
        scheduler=scheduler, links=links, sessions=sessions, chunk_tokens=CHUNK_TOKENS
    )
    started_s = time.process_time()
    report = offline(*found, azure(), config)
    return row(
        report,
        time.process_time() - started_s,
        cluster=cluster,
        model=model,
        mode="offline",
        placement=placement,
        scheduler=scheduler,
        links=links,
        published_tokens_per_s=figure,
        source=source,
    )


def run_online(
    cluster: str,
    model: str,
    placement: str,
    scheduler: str,
    links: str,
    figure: float | None,
    source: str,
    tokens_per_s: float,
) -> Row:
    """One online run: arrivals for so many tokens/s, half an hour."""
    if placement == "ours":
        found: tuple[Problem, Profiles, Plan | Placement] = ours(cluster, model)
    else:
        found = published(f"{cluster}/{model}/{placement}")
    arrivals = resampled(azure(), tokens_per_s=tokens_per_s, duration_s=1800.0, seed=0)
    chunk = CHUNK_TOKENS if scheduler == "anabranch" else None
    config = OnlineConfig(scheduler=scheduler, links=links, chunk_tokens=chunk)
    started_s = time.process_time()
    report = online(*found, arrivals, config)
    return row(
        report,
        time.process_time() - started_s,
        cluster=cluster,
        model=model,
        mode=f"online, {tokens_per_s:g} tokens/s arrive",
        placement=placement,
        scheduler=scheduler,
        links=links,
        published_tokens_per_s=figure,
        source=source,
    )


Job = tuple[Callable[..., Row], tuple[Any, ...]]
README = "artifact README"
PRINTED = "printed by Helix's simulator"
OURS = ("anabranch", "framed")


def _helix_70b() -> list[Job]:
    jobs: list[Job] = []
    for cluster, section, case, feed in (
        ("single24", "6.3", "single", 180),
        ("geo24", "6.4", "geo", 180),
        ("het42", "6.5", "het42", 500),
    ):
        model = "" if cluster == "het42" else " llama70b"
        swarm = _readme(f"Section {section}: swarm{model} offline")
        helix = _artifact(f"{case}_70b_helix")
        petals = _artifact(f"{case}_70b_petals_hsched")
        by_flow = _artifact(f"{case}_70b_swarm_hsched")
        in_order = ("helix", "in-order")
        jobs += [
            (run_offline, (cluster, "70b", "helix", *in_order, helix, PRINTED)),
            (run_offline, (cluster, "70b", "petals", *in_order, petals, PRINTED)),
            (run_offline, (cluster, "70b", "swarm", *in_order, by_flow, PRINTED)),
            (run_offline, (cluster, "70b", "swarm", "swarm", "in-order", swarm, README, feed)),
            (run_offline, (cluster, "70b", "helix", *OURS, None, "")),
            (run_offline, (cluster, "70b", "ours", *in_order, None, "")),
            (run_offline, (cluster, "70b", "ours", *OURS, None, "")),
        ]
    return jobs


def _helix_30b() -> list[Job]:
    jobs: list[Job] = []
    feeds = {"single24": (30, 25, 25), "geo24": (35, 40, 40)}
    for cluster, feed in (("single24", 50), ("geo24", 60)):
        section = "6.3" if cluster == "single24" else "6.4"
        for gpu, sessions in zip(("a100", "l4", "t4"), feeds[cluster], strict=True):
            sub = f"{cluster}_sub_{gpu}"
            jobs.append((run_offline, (sub, "30b", "helix", "helix", "in-order", None, "")))
            jobs.append((run_offline, (sub, "30b", "sp", "random", "in-order", None, "", sessions)))
        swarm = _readme(f"Section {section}: swarm llama30b offline")
        jobs += [
            (run_offline, (cluster, "30b", "swarm", "swarm", "in-order", swarm, README, feed)),
            (run_offline, (cluster, "30b", "ours", *OURS, None, "")),
        ]
    return jobs


def _helix_online() -> list[Job]:
    jobs: list[Job] = []
    for cluster, section, rate in (
        ("single24", "6.3", 700),
        ("geo24", "6.4", 320),
        ("het42", "6.5", 2150),
    ):
        model = "" if cluster == "het42" else " llama70b"
        figure = _readme(f"Section {section}: helix{model} online")
        jobs += [
            (run_online, (cluster, "70b", "helix", "helix", "in-order", figure, README, rate)),
            (run_online, (cluster, "70b", "ours", *OURS, None, "", rate)),
        ]
    return jobs


RECIPES: dict[str, tuple[str, Callable[[], list[Job]]]] = {
    "helix-offline-70b": ("Helix §6.3-6.6, LLaMA 70B, full load", _helix_70b),
    "helix-offline-30b": ("Helix §6.3-6.4, LLaMA 30B, full load", _helix_30b),
    "helix-online-70b": ("Helix §6.3-6.5, LLaMA 70B, requests at their own times", _helix_online),
}


def _run(job: Job) -> Row:
    function, arguments = job
    return function(*arguments)


def run_recipe(name: str, processes: int) -> dict[str, Any]:
    """Run a recipe's jobs side by side and write its JSON."""
    title, jobs = RECIPES[name]
    started_s = time.monotonic()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    wanted = jobs()
    rows: list[Row] = []
    RESULTS.mkdir(parents=True, exist_ok=True)

    def write() -> dict[str, Any]:
        result = {
            "recipe": name,
            "title": title,
            "command": f"python -m bench.papers {name}",
            "commit": commit,
            "cores": processes,
            "wall_s": round(time.monotonic() - started_s, 1),
            "seed": 0,
            "complete": len(rows) == len(wanted),
            "published_sums": _published_sums(),
            "rows": [asdict(done) for done in rows],
        }
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        return result

    with ProcessPoolExecutor(processes) as pool:
        for done in pool.map(_run, wanted):
            rows.append(done)
            write()
            print(
                f"{name}: {done.cluster}/{done.model} {done.placement}, {done.scheduler},"
                f" {done.links}: {done.tokens_per_s:.1f} tokens/s",
                file=sys.stderr,
            )
    return write()


def _published_sums() -> dict[str, float | None]:
    """Decode tokens/s of the three clusters by GPU type together, for LLaMA 30B."""
    return {
        f"{cluster}/{placement}": _readme(f"Section {section}: {method} llama30b offline")
        for cluster, section in (("single24", "6.3"), ("geo24", "6.4"))
        for placement, method in (("helix", "helix"), ("sp", "separate"))
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.papers", description=__doc__)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="which; all without any")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    arguments = parser.parse_args(argv)
    if arguments.list:
        for name, (title, _) in RECIPES.items():
            print(f"{name}: {title}")
        return 0
    unknown = [name for name in arguments.recipes if name not in RECIPES]
    if unknown:
        print(f"error: no recipe {unknown[0]}; there are {', '.join(RECIPES)}", file=sys.stderr)
        return 2
    for name in arguments.recipes or RECIPES:
        run_recipe(name, arguments.processes)
    write_report(RESULTS, Path(__file__).parents[1] / "docs" / "results.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
