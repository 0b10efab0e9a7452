"""Helix's experiments (ASPLOS'25, §6.3-6.8)."""

import time
from collections.abc import Sequence
from typing import Any

from bench.papers.clusters import (
    Found,
    artifact,
    azure,
    ours,
    planned_s,
    published,
    readme,
    searched,
)
from bench.papers.full_load import OURS, SCHEDULERS, PaperRules, offline, online
from bench.papers.jobs import Job, Recipe, Row
from coordinator.commands.full_load import Rules
from coordinator.simulator.core.report import SimulationReport
from coordinator.simulator.core.trace import resampled

ONLINE_S = 1800.0
README = "artifact README"
PRINTED = "Helix's simulator"
LADDER = {
    "living batches, room and load": PaperRules(
        scheduler="helix", living=Rules(links="in-order", chunk_tokens=None, hub=True)
    ),
    "and chunks": PaperRules(scheduler="helix", living=Rules(links="in-order", hub=True)),
    "and links": PaperRules(scheduler="helix", living=Rules(hub=True)),
    "and router": PaperRules(living=Rules(hub=True)),
    "and ring": OURS,
}
"""From Helix's rules to the living ones, one at a time, all with Helix's plan."""
RULES = {
    "living": OURS,
    **{name: PaperRules(scheduler=name) for name in SCHEDULERS},
    **LADDER,
}
SEARCH_S = (1.0, 3.0, 10.0, 30.0)
CURVE_S = 1200.0
"""Time in which a curve's requests arrive; its second half is measured."""
CURVE = (0.75, 0.9)
"""Decoded tokens/s that arrive, as shares of what Helix serves under full load."""
CURVES = {
    ("single24", "70b"): (1.1, 2.0),
    ("geo24", "70b"): (1.1, 2.0, 3.5),
    ("het42", "70b"): (1.1, 1.5),
    ("single24", "30b"): (1.1, 1.5),
    ("geo24", "30b"): (1.1, 2.0),
}
"""Shares that ours serves besides, up to most of its own full load."""


def figures(report: SimulationReport, took_s: float) -> Row:
    """What a table says of a run."""
    return {
        "tokens_per_s": report.decode_tokens_per_s,
        "prompt_s": report.prompt.mean_s,
        "prompt_p50_s": report.prompt.percentiles_s[50],
        "prompt_p99_s": report.prompt.percentiles_s[99],
        "token_s": report.decode.mean_s,
        "token_p50_s": report.decode.percentiles_s[50],
        "token_p99_s": report.decode.percentiles_s[99],
        "sessions_live": report.sessions_live,
        "kv_peak": max((use.kv_peak for use in report.peers.values()), default=0.0),
        "times_real": report.simulated_s / max(took_s, 1e-9),
    }


def find(cluster: str, model: str, placement: str) -> Found:
    """A published placement by its name, or ours."""
    if placement == "ours":
        return ours(cluster, model)
    return published(f"{cluster}/{model}/{placement}")


def full_load(
    cluster: str,
    model: str,
    placement: str,
    rules: str,
    published_tokens_per_s: float | None = None,
    source: str = "",
    sessions: int = 180,
) -> Row:
    """One offline run: Helix's load for its rules, sessions without end for the others."""
    found = find(cluster, model, placement)
    started_s = time.process_time()
    report = offline(*found, azure(), RULES[rules], sessions=sessions)
    return {
        "cluster": cluster,
        "model": model,
        "mode": "full load",
        "placement": placement,
        "rules": rules,
        **RULES[rules].names(),
        "published_tokens_per_s": published_tokens_per_s,
        "source": source,
        "planned_s": planned_s(cluster, model) if placement == "ours" else None,
        **figures(report, time.process_time() - started_s),
    }


def at_their_times(
    cluster: str,
    model: str,
    placement: str,
    rules: str,
    rate: float,
    published_tokens_per_s: float | None = None,
    source: str = "",
) -> Row:
    """One online run: the same arrivals, drawn from the trace, half an hour long, for everybody."""
    return {
        "mode": f"{rate:g} tokens/s arrive",
        "published_tokens_per_s": published_tokens_per_s,
        "source": source,
        "planned_s": planned_s(cluster, model) if placement == "ours" else None,
        **_arriving(cluster, model, placement, rules, rate, ONLINE_S),
    }


def on_curve(cluster: str, model: str, placement: str, rules: str, share: float) -> Row:
    """One point of prompt time against tokens/s: requests that arrive at a share of the decoded
    tokens/s that Helix serves under full load."""
    decoded = sum(r.output_tokens for r in azure())
    total = decoded + sum(r.input_tokens for r in azure())
    rate = share * helix_serves(cluster, model)
    rows = rate * total / decoded
    return {
        "share": share,
        "arriving_tokens_per_s": rate,
        **_arriving(cluster, model, placement, rules, rows, CURVE_S, warm_up_s=CURVE_S / 2),
    }


def _arriving(
    cluster: str,
    model: str,
    placement: str,
    rules: str,
    rate: float,
    duration_s: float,
    *,
    warm_up_s: float = 0.0,
) -> Row:
    """A run of requests that come for ``duration_s``, ``rate`` tokens/s of prompts and answers;
    measured from ``warm_up_s`` on."""
    arrivals = resampled(azure(), tokens_per_s=rate, duration_s=duration_s, seed=0)
    found = find(cluster, model, placement)
    started_s = time.process_time()
    measured_s = duration_s - warm_up_s
    report = online(*found, arrivals, RULES[rules], warm_up_s=warm_up_s, measured_s=measured_s)
    return {
        "cluster": cluster,
        "model": model,
        "placement": placement,
        "rules": rules,
        **RULES[rules].names(),
        **figures(report, time.process_time() - started_s),
    }


def helix_serves(cluster: str, model: str) -> float:
    """Published decoded tokens/s of Helix's best plan and its scheduler under full load."""
    if model == "30b":
        known = published_sums()[f"{cluster}/helix"]
    else:
        known = artifact(f"{cluster.removesuffix('24')}_{model}_helix")
    assert known is not None, f"nothing was published for {cluster}/{model}"
    return known


def after_seconds(cluster: str, model: str, limit_s: float) -> Row:
    """What a plan serves that was searched for this number of seconds."""
    problem, profiles, placement, took_s = searched(cluster, model, limit_s)
    started_s = time.process_time()
    report = offline(problem, profiles, placement, azure(), OURS)
    return {
        "cluster": cluster,
        "model": model,
        "limit_s": limit_s,
        "searched_s": took_s,
        "planner": placement.planner,
        "flow_tokens_per_s": placement.flow_tokens_per_s,
        "estimate_tokens_per_s": placement.estimate_tokens_per_s or 0.0,
        **figures(report, time.process_time() - started_s),
    }


def _offline(
    cluster: str,
    model: str,
    placement: str,
    rules: str,
    figure: float | None = None,
    source: str = "",
    sessions: int = 180,
) -> Job:
    return Job(
        key=f"{cluster}/{model} {placement}, {rules}",
        call=full_load,
        arguments={
            "cluster": cluster,
            "model": model,
            "placement": placement,
            "rules": rules,
            "published_tokens_per_s": figure,
            "source": source if figure is not None else "",
            "sessions": sessions,
        },
    )


def _offline_70b() -> Sequence[Job]:
    jobs: list[Job] = []
    for cluster, section, case, feed in (
        ("single24", "6.3", "single", 180),
        ("geo24", "6.4", "geo", 180),
        ("het42", "6.5", "het42", 500),
    ):
        model = "" if cluster == "het42" else " llama70b"
        theirs = readme(f"Section {section}: swarm{model} offline")
        of = (cluster, "70b")
        jobs += [
            _offline(*of, "helix", "helix", artifact(f"{case}_70b_helix"), PRINTED),
            _offline(*of, "petals", "helix", artifact(f"{case}_70b_petals_hsched"), PRINTED),
            _offline(*of, "swarm", "helix", artifact(f"{case}_70b_swarm_hsched"), PRINTED),
            _offline(*of, "swarm", "swarm", theirs, README, feed),
            _offline(*of, "helix", "living"),
            _offline(*of, "ours", "helix"),
            _offline(*of, "ours", "living"),
        ]
    return jobs


def _offline_30b() -> Sequence[Job]:
    jobs: list[Job] = []
    feeds = {"single24": (30, 25, 25), "geo24": (35, 40, 40)}
    for cluster, feed in (("single24", 50), ("geo24", 60)):
        section = "6.3" if cluster == "single24" else "6.4"
        for gpu, sessions in zip(("a100", "l4", "t4"), feeds[cluster], strict=True):
            sub = f"{cluster}_sub_{gpu}"
            jobs.append(_offline(sub, "30b", "helix", "helix"))
            jobs.append(_offline(sub, "30b", "sp", "random", sessions=sessions))
        theirs = readme(f"Section {section}: swarm llama30b offline")
        jobs += [
            _offline(cluster, "30b", "swarm", "swarm", theirs, README, feed),
            _offline(cluster, "30b", "ours", "helix"),
            _offline(cluster, "30b", "ours", "living"),
        ]
    return jobs


def published_sums() -> dict[str, float | None]:
    """Decode tokens/s of the three clusters by GPU type together, for LLaMA 30B."""
    return {
        f"{cluster}/{placement}": readme(f"Section {section}: {method} llama30b offline")
        for cluster, section in (("single24", "6.3"), ("geo24", "6.4"))
        for placement, method in (("helix", "helix"), ("sp", "separate"))
    }


def _online_70b() -> Sequence[Job]:
    jobs: list[Job] = []
    for cluster, section, rate in (
        ("single24", "6.3", 700),
        ("geo24", "6.4", 320),
        ("het42", "6.5", 2150),
    ):
        model = "" if cluster == "het42" else " llama70b"
        figure = readme(f"Section {section}: helix{model} online")
        theirs = readme(f"Section {section}: swarm{model} online")
        for placement, rules, known in (
            ("helix", "helix", figure),
            ("swarm", "swarm", theirs),
            ("helix", "living", None),
            ("ours", "living", None),
        ):
            jobs.append(
                Job(
                    key=f"{cluster}/70b online {placement}, {rules}",
                    call=at_their_times,
                    arguments={
                        "cluster": cluster,
                        "model": "70b",
                        "placement": placement,
                        "rules": rules,
                        "rate": rate,
                        "published_tokens_per_s": known,
                        "source": README if known is not None else "",
                    },
                    cost_s=20.0,
                )
            )
    return jobs


def _schedulers() -> Sequence[Job]:
    rules = ("helix", "swarm", "random", "shortest_queue")
    known: dict[str, Any] = {
        rule.replace("_", "-"): readme(f"Section 6.7: setup2_distributed.py {rule}")
        for rule in rules
    }
    jobs: list[Job] = []
    for cluster in ("geo24", "single24"):
        for placement in ("helix", "ours"):
            for rule, value in known.items():
                figure = value if (cluster, placement) == ("geo24", "helix") else None
                jobs.append(_offline(cluster, "70b", placement, rule, figure, README))
            jobs.append(_offline(cluster, "70b", placement, "living"))
    return jobs


def _split() -> Sequence[Job]:
    """Each headline in parts: what the rules bring one by one, then the plan."""
    return [
        _offline(cluster, "70b", placement, rules)
        for cluster in ("single24", "geo24", "het42")
        for placement, rules in (
            ("helix", "helix"),
            *(("helix", rules) for rules in LADDER),
            ("ours", "living"),
            ("ours", "helix"),
        )
    ]


def _ablation() -> Sequence[Job]:
    jobs: list[Job] = []
    for cluster, count, hinted in (("geo24", 24, "helix"), ("het42", 42, "helix")):
        figure = readme(f"Section 6.8: ablation1_pruning.py simulate {count}")
        no_prune = f"ablation_no_prune_{count}"
        jobs += [
            _offline(cluster, "70b", hinted, "helix"),
            _offline(cluster, "70b", no_prune, "helix", figure, README),
            _offline(cluster, "70b", f"ablation_raw_{count}", "helix"),
        ]
    return jobs


def _curve() -> Sequence[Job]:
    """Both sides up to most of Helix's full load where it has one plan, ours from there on."""
    return [
        Job(
            key=f"{cluster}/{model} {placement}, {share:g}",
            call=on_curve,
            arguments={
                "cluster": cluster,
                "model": model,
                "placement": placement,
                "rules": rules,
                "share": share,
            },
            cost_s=20.0 * share,
        )
        for (cluster, model), more in CURVES.items()
        for placement, rules, shares in (
            ("helix", "helix", CURVE if model == "70b" else ()),
            ("ours", "living", (*CURVE, *more)),
        )
        for share in shares
    ]


def _search() -> Sequence[Job]:
    return [
        Job(
            key=f"{cluster}/{model} after {limit_s:g} s",
            call=after_seconds,
            arguments={"cluster": cluster, "model": model, "limit_s": limit_s},
            cost_s=10.0 + limit_s,
        )
        for cluster, model in (("single24", "70b"), ("geo24", "70b"), ("het42", "70b"))
        for limit_s in SEARCH_S
    ]


RECIPES = (
    Recipe(
        name="helix-offline-70b",
        title="Helix §6.3-6.6: LLaMA 70B under full load",
        jobs=_offline_70b,
    ),
    Recipe(
        name="helix-offline-30b",
        title="Helix §6.3-6.4: LLaMA 30B under full load",
        jobs=_offline_30b,
    ),
    Recipe(
        name="helix-split",
        title="What plan, chunks, links, router and ring bring, LLaMA 70B under full load",
        jobs=_split,
    ),
    Recipe(
        name="helix-online-70b",
        title="Helix §6.3-6.5: LLaMA 70B, requests at their own times",
        jobs=_online_70b,
    ),
    Recipe(
        name="helix-curve",
        title="Prompt times at the same tokens/s, ours and Helix's",
        jobs=_curve,
    ),
    Recipe(
        name="helix-schedulers", title="Helix §6.7: schedulers over one placement", jobs=_schedulers
    ),
    Recipe(
        name="helix-ablation", title="Helix §6.8: what pruning and hints are worth", jobs=_ablation
    ),
    Recipe(
        name="search",
        title="What our planner finds after so many seconds",
        jobs=_search,
    ),
)
