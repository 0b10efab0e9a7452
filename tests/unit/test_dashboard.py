"""docker/grafana.json asks for nothing that gateway and health page do not export."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from client.gateway.metrics import Metrics
from client.health.app import metrics_text
from dht.process.supervision import Supervisor
from testing import paper_health

BOARD = json.loads((Path(__file__).parents[2] / "docker" / "grafana.json").read_text())
PROMETHEUS = {"job", "instance"}
"""Labels that Prometheus adds itself."""


def samples(*texts: bytes) -> dict[str, set[str]]:
    """The labels of each exported sample, by its name."""
    found: dict[str, set[str]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                found.setdefault(sample.name, set(PROMETHEUS)).update(sample.labels)
    return found


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    metrics, parts = Metrics(), Supervisor()
    model = metrics.of("brook")
    model.succeeded("stop")
    metrics.responded("/v1/models", 200)
    metrics.used("key", 200, 1, 1)
    parts.failures["part"] += 1
    return samples(metrics.text(), metrics_text(paper_health.healthy(), parts))


def expressions(panel: dict[str, Any]) -> list[str]:
    """All that a panel asks Prometheus."""
    return [target["expr"] for target in panel.get("targets", [])]


def unknown(expr: str, exported: dict[str, set[str]]) -> set[str]:
    """Names of metrics, and of labels of those metrics, that are not exported."""
    names = set(re.findall(r"anabranch:\w+", expr))
    labels = set(re.findall(r'(\w+)\s*(?:=~|!=|=)\s*"', expr))
    for group in re.findall(r"by \(([^)]*)\)", expr):
        labels |= set(re.split(r",\s*", group))
    known = [exported[name] for name in names & exported.keys()]
    return (names - exported.keys()) | {n for n in labels if not all(n in each for each in known)}


def test_each_metric_and_label_of_the_dashboard_is_exported(exported: dict[str, set[str]]) -> None:
    panels = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
    for panel in panels:
        assert expressions(panel), panel["title"]
        for expr in expressions(panel):
            assert re.search(r"anabranch:\w", expr), expr
            assert unknown(expr, exported) == set(), (panel["title"], expr)
    (model,) = [each for each in BOARD["templating"]["list"] if each["name"] == "model"]
    names = re.search(r"anabranch:\((.*)\)", model["query"]["query"])
    assert names is not None
    for name in names[1].split("|"):
        assert unknown(f"anabranch:{name}", exported) == set()
    assert unknown("sum by (colour) (anabranch:tokens)", exported) == {"anabranch:tokens"}
    assert unknown('anabranch:swarm_healthy{colour="red"}', exported) == {"colour"}


def test_each_metric_of_gateway_and_page_is_on_the_dashboard(exported: dict[str, set[str]]) -> None:
    shown = {
        name
        for panel in BOARD["panels"]
        for expr in expressions(panel)
        for name in re.findall(r"anabranch:\w+", expr)
    }
    kinds = re.compile(r"_(bucket|count|sum|created|total)$")
    missing = {kinds.sub("", name) for name in exported} - {kinds.sub("", name) for name in shown}
    assert missing == set()


def test_panels_neither_overlap_nor_share_an_id() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in BOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
