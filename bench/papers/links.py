"""MoLink's tables (EMNLP Findings 2025, §4), with :mod:`bench.wan`'s swarm."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench import wan
from bench.papers.jobs import Job, Recipe, Row
from bench.stand_in import Setting, floor, serve, summary

SOURCES = (
    "bench/wan.py",
    "bench/stand_in.py",
    "bench/timed_engine.py",
    "bench/papers/links.py",
    "bench/data/azure",
)
ROOMS = ("node", "client", "coordinator", "dht")


def cell(**arguments: Any) -> Row:
    """One cell of the tables."""
    setting = Setting(**arguments)
    started_s = time.process_time()
    served = summary(serve(setting))
    return {
        **asdict(setting),
        "floor": floor(setting),
        **served,
        "took_cpu_s": time.process_time() - started_s,
    }


def _cells(settings: Sequence[Setting]) -> Sequence[Job]:
    return [
        Job(
            key=f"{s.policy}, {s.requests_per_s:g}/s, {s.mbit:g} Mbit/s, {s.delay_s * 1e3:g} ms",
            call=cell,
            arguments=asdict(s),
            cost_s=70.0 * s.requests_per_s,
        )
        for s in settings
    ]


def _usual(setting: Setting) -> bool:
    return (setting.mbit, setting.delay_s) == (100.0, 0.03)


def _rates() -> Sequence[Job]:
    return _cells([s for s in wan.settings(quick=False) if _usual(s)])


def _shapes() -> Sequence[Job]:
    return _cells([s for s in wan.settings(quick=False) if not _usual(s)])


def changed() -> Row:
    """The bandwidth falls and returns."""
    found = wan.change()
    return {"phases": found["phases"], "trace": found["trace"][::10]}


RECIPES = (
    Recipe(
        name="molink",
        title="MoLink's tables: more and more requests over 100 Mbit/s and 30 ms",
        jobs=_rates,
        sources=(*ROOMS, *SOURCES),
    ),
    Recipe(
        name="molink-links",
        title="MoLink's tables: other bandwidths and delays, 0.3 requests/s",
        jobs=_shapes,
        sources=(*ROOMS, *SOURCES),
    ),
    Recipe(
        name="change",
        title="A link that changes: 100, 20, 100 Mbit/s",
        jobs=lambda: [Job(key="change", call=changed, arguments={}, cost_s=30.0)],
        sources=(*ROOMS, *SOURCES),
    ),
)
