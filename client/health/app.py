"""The health page's HTTP side: page, badge, API, metrics; headers that allow no foreign code."""

import time
from collections.abc import Callable
from pathlib import Path

import jinja2
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from client.health.badge import badge_svg
from client.health.drawing import (
    coverage_drawing,
    flow_drawing,
    held_drawing,
    latency_drawing,
    throughput_drawing,
)
from client.health.words import (
    COLUMNS,
    FLAGS,
    NOTHING,
    long_duration,
    megabits,
    milliseconds,
)
from client.pages.fixed import HEADERS, fixed_file, page_files
from dht.networks.invitation import SCHEME
from dht.process.json_file import Json
from dht.process.supervision import Supervisor

HERE = Path(__file__).parent
FILES = page_files(HERE / "static")
MATRIX_PEERS_MAX = 10
INCIDENTS_OPEN = 5
"""Incidents that stand there without a click."""


def rate(seconds_each: float | None) -> str:
    """Tokens/s, as ``24.4``, where one takes ``seconds_each``; a dash without a value."""
    return f"{1 / seconds_each:.3g}" if seconds_each else NOTHING


def ago(unix_s: float, now_unix_s: float) -> str:
    """How long before ``now_unix_s``: ``4 min ago``."""
    return f"{long_duration(max(0.0, now_unix_s - unix_s))} ago"


def weekday_time(unix_s: float) -> str:
    """A UTC time of the last week: ``Tue 05:13``."""
    return time.strftime("%a %H:%M", time.gmtime(unix_s))


def _matrix(state: Json) -> Json | None:
    """Links between peers as a table, row to column, while there are few enough to read."""
    ends = {end for link in state["links"] for end in (link["from"], link["to"])}
    shown = [peer for peer in state["peers"] if peer["id"] in ends and peer["state"] != "gone"]
    if not 2 <= len(shown) <= MATRIX_PEERS_MAX:
        return None
    measured = {(link["from"], link["to"]): link for link in state["links"]}
    rows = [
        {
            "name": row["name"],
            "cells": [measured.get((row["id"], column["id"])) for column in shown],
        }
        for row in shown
    ]
    return {"columns": [peer["name"] for peer in shown], "rows": rows}


class Page:
    """The web application. ``state`` gives what :func:`client.health.state.build_state` built."""

    def __init__(
        self,
        state: Callable[[], Json],
        *,
        refresh_s: int = 30,
        parts: Supervisor | None = None,
    ) -> None:
        """``parts`` keeps the page's loops running; its failures are in the metrics."""
        self._state = state
        self._parts = parts or Supervisor()
        self._refresh_s = refresh_s
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
        )
        environment.filters.update(
            long_duration=long_duration,
            milliseconds=milliseconds,
            megabits=megabits,
            rate=rate,
            ago=ago,
            weekday_time=weekday_time,
        )
        self._template = environment.get_template("page.html")
        self._shown: tuple[Json, str] | None = None
        self.app = web.Application(middlewares=[self._headers], client_max_size=1024)
        self.app.add_routes(
            [
                web.get("/", self._page),
                web.get("/api/v1/state", self._api),
                web.get("/badge.svg", self._badge),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                *(web.get(path, self._file) for path in FILES),
            ]
        )

    @web.middleware
    async def _headers(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = web.Response(status=error.status, text=f"{error.status} {error.reason}\n")
        response.headers.update(HEADERS)
        return response

    def render(self, state: Json) -> str:
        """The page as HTML."""
        names = {peer["id"]: peer["name"] for peer in state["peers"]}
        here = {peer["id"] for peer in state["peers"] if peer["state"] not in {"silent", "gone"}}
        verdict, now_unix_s = state["swarm"]["verdict"], state["generated_unix_s"]
        return self._template.render(
            state=state,
            version=_version(state),
            verdict=verdict.capitalize(),
            kind=_kind(verdict),
            sentence=_without_verdict(state["swarm"]["sentence"]),
            incidents_open=INCIDENTS_OPEN,
            columns=COLUMNS,
            refresh_s=self._refresh_s,
            invited=any(f" {SCHEME}" in model["ask"] for model in state["models"]),
            matrix=_matrix(state),
            coverage=coverage_drawing(state["layers"]),
            flow=flow_drawing(state["plan"], names, here),
            held=held_drawing(state["peers"], state["layers"]["count"]),
            charts=[
                (throughput_drawing(past, now_unix_s), latency_drawing(past, now_unix_s))
                for past in state["history"]
            ],
            at=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_unix_s)),
        )

    async def _page(self, request: web.Request) -> web.Response:
        state = self._state()
        # Rendered once for each state, and once a second where it grows old, however many look.
        if self._shown is None or not _says_the_same(state, self._shown[0]):
            self._shown = (state, self.render(state))
        response = web.Response(text=self._shown[1], content_type="text/html")
        response.etag = _version(state)
        response.enable_compression()
        return response

    async def _api(self, request: web.Request) -> web.Response:
        return web.json_response(body=msgspec.json.encode(self._state()))

    async def _badge(self, request: web.Request) -> web.Response:
        return web.Response(text=badge_svg(self._state()), content_type="image/svg+xml")

    async def _health(self, request: web.Request) -> web.Response:
        """200 where the swarm is healthy, 503 with the reasons where it is not."""
        swarm = self._state()["swarm"]
        body = msgspec.json.encode({"healthy": swarm["healthy"], "reasons": swarm["reasons"]})
        return web.json_response(body=body, status=200 if swarm["healthy"] else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=metrics_text(self._state(), self._parts),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _file(self, request: web.Request) -> web.Response:
        return fixed_file(FILES[request.path], request)


def metrics_text(state: Json, parts: Supervisor) -> bytes:
    """The state in Prometheus' text format, after vLLM's names where it has them."""
    registry = CollectorRegistry()
    registry.register(parts)
    probes, layers, model = state["probes"], state["layers"], state["swarm"]["model"]

    def gauge(name: str, text: str, value: float, **labels: str) -> None:
        made = gauges.get(name)
        if made is None:
            keys = ("model_name", *labels)
            made = gauges[name] = Gauge(f"anabranch:{name}", text, keys, registry=registry)
        made.labels(model, *labels.values()).set(value)

    gauges: dict[str, Gauge] = {}
    gauge("swarm_healthy", "1 where the swarm is healthy.", state["swarm"]["healthy"])
    gauge("swarm_peers_serving", "Peers that serve and are believed.", state["swarm"]["serving"])
    for name in ("answers", "tokens"):
        total = sum(hour[name] for hour in state["served"]["hours"])
        gauge(f"swarm_{name}_week", f"Served {name} of the last week, as peers count.", total)
    gauge("swarm_replica_depth", "Holders of the layer with fewest.", layers["replica_depth"])
    gauge("swarm_layers_lost", "Layers that nobody holds.", len(layers["lost"]))
    for flag in FLAGS:
        count = sum(flag in peer["flags"] for peer in state["peers"])
        gauge("swarm_peers_flagged", "Peers that are marked.", count, flag=flag)
    for name, key in (
        ("time_to_first_token_seconds", "ttft"),
        ("request_time_per_output_token_seconds", "tpot"),
    ):
        for share, label in ((50, "0.5"), (95, "0.95")):
            if (value := probes[f"{key}_p{share}_s"]) is not None:
                gauge(name, "Of the page's own requests in the last hour.", value, quantile=label)
    if state["plan"] is not None:
        flow = state["plan"]["flow_tokens_per_s"]
        gauge("plan_flow_tokens_per_second", "The plan's flow.", flow)
    return generate_latest(registry)


def _without_verdict(sentence: str) -> str:
    """The sentence after its first word, which stands above it."""
    rest = sentence.partition(": ")[2]
    return rest[:1].upper() + rest[1:]


def _says_the_same(state: Json, shown: Json) -> bool:
    own, other = ((_version(each), each["swarm"]["sentence"]) for each in (state, shown))
    return state["peers"] is shown["peers"] and own == other


def _version(state: Json) -> str:
    """Another one for each page that says something else; its ETag, which a look asks for."""
    return f"{state['generated_unix_s']}-{_kind(state['swarm']['verdict'])}"


def _kind(verdict: str) -> str:
    """A verdict as one word."""
    return verdict.replace(",", "").replace(" ", "-")
