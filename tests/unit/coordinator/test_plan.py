"""``coordinator.plan``: cluster files, the JSON contract, and mistakes in one line."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest

from coordinator.plan import main
from coordinator.planning.placement import PLACEMENT
from coordinator.planning.search.columns import Master
from coordinator.problem.cluster_file import read_cluster
from dht.errors import UserError
from dht.identity.peer_id import Identity
from dht.messages.types import SharedUplink

OWN = {
    "schema": "anabranch-cluster/1",
    "models": {
        "tiny": {
            "layers": 8,
            "layer_bytes": 100,
            "embed_bytes": 50,
            "head_bytes": 70,
            "activation_bytes": 64,
        }
    },
    "nodes": [
        {"id": name, "memory_bytes": 480, "tokens_per_s": {"tiny": [80.0, 40.0, 30.0, 20.0]}}
        for name in "abc"
    ],
    "links": [["a", "b", 1e6, 0.01]],
}

NODES: list[dict] = OWN["nodes"][:2]  # type: ignore[assignment,index]

SHARED = {
    **OWN,
    "nodes": [
        {"id": name, "memory_bytes": 480, "tokens_per_s": {"tiny": [80.0, 40.0, 30.0, 20.0]}}
        | ({"uplink": "home"} if name in "ab" else {})
        for name in "abcd"
    ],
    "links": [],
    "uplinks": {"home": {"up_bytes_per_s": 640.0}},
}
"""Two of four nodes behind one connection, which carries ten tokens/s."""

HELIX = {
    "schema": "helix-cluster/1",
    "name": "hand",
    "coordinator": {"id": "coordinator"},
    "models": {
        "30b": {
            "layers": 6,
            "token_bytes": 2,
            "activation_bytes": 1000,
            "layer_bytes": 1000.5,
            "upper_bound_tps": 100.0,
            "gpus": {
                "T4": {"max_layers": 3, "tokens_per_s": [90.0, 40.0, 25.0]},
                "L4": {"max_layers": 4, "tokens_per_s": [100.0, 50.0, 33.0, 20.0]},
            },
        }
    },
    "nodes": [
        {"id": 0, "gpu": "T4", "region": "r0", "vram_bytes": 1},
        {"id": 1, "gpu": "L4", "region": "r0", "vram_bytes": 1},
    ],
    "links": [
        ["coordinator", 0, 1e6, 0.001],
        ["coordinator", 1, 1e6, 0.001],
        [0, 1, 20000.0, 0.01],
        [1, 0, 1e9, 0.01],
    ],
}


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time goes by with the work that is done, so that a busy machine plans as well; trials, which
    do not look at the clock, are few."""
    monkeypatch.setattr(
        "coordinator.planning.placement.PLACEMENT", replace(PLACEMENT, trials_max=1)
    )
    looks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(looks) / 200)
    monkeypatch.setattr("coordinator.plan.time", clock)


@pytest.fixture
def write(tmp_path: Path):
    def write_(content: object) -> str:
        path = tmp_path / "cluster.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write_


def test_json_keeps_its_contract(write, capsys):
    assert main([write(OWN), "--model", "tiny", "--time-limit", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) == {
        "planner",
        "placement",
        "edges",
        "flow_tokens_per_s",
        "bound_tokens_per_s",
        "estimate_tokens_per_s",
        "one_answer_tokens_per_s",
        "answer_weight",
        "fetch_bytes",
        "search",
        "seconds",
    }
    layers = {layer for start, end in answer["placement"].values() for layer in range(start, end)}
    assert layers == set(range(8))
    assert answer["flow_tokens_per_s"] == pytest.approx(30.0)
    assert answer["estimate_tokens_per_s"] > 0
    spans = answer["placement"].values()
    ends = 50 * sum(s == 0 for s, _ in spans) + 70 * sum(e == 8 for _, e in spans)
    assert answer["fetch_bytes"] == 100 * sum(e - s for s, e in spans) + ends
    assert answer["flow_tokens_per_s"] <= answer["bound_tokens_per_s"]


def test_layers_of_other_sizes_need_what_they_have(write, capsys):
    """Two peers suffice for 4 x 100 and 4 x 20 bytes."""
    sizes = [100, 20] * 4
    uneven = {**OWN["models"]["tiny"], "layer_bytes": sizes}
    few = {**OWN, "models": {"tiny": uneven}, "nodes": [{**n, "memory_bytes": 310} for n in NODES]}
    assert main([write(few), "--time-limit", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {(start, end) for start, end in answer["placement"].values()} == {(0, 4), (4, 8)}
    few["models"]["tiny"]["layer_bytes"] = 100
    assert main([write(few), "--time-limit", "1", "--json"]) == 2
    assert "can hold at most" in capsys.readouterr().err
    few["models"]["tiny"]["layer_bytes"] = sizes[:3]
    assert main([write(few), "--time-limit", "1", "--json"]) == 2
    assert "tiny has 8 layers and the bytes of 3" in capsys.readouterr().err


def test_helix_clusters(write, capsys):
    problem = read_cluster(json.dumps(HELIX).encode(), "30b")
    assert [len(node.tokens_per_s) for node in problem.nodes] == [3, 4]
    assert problem.client_bandwidth_bytes_per_s == 1e6
    assert {(k.source, k.target): k.rtt_s for k in problem.links} == {
        ("0", "1"): 0.02,
        ("1", "0"): 0.02,
    }
    assert main([write(HELIX), "--model", "30b", "--time-limit", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    # 1 -> 0 over the fast link; three layers each: min(25, 33).
    assert answer["placement"] == {"1": [0, 3], "0": [3, 6]}
    assert answer["flow_tokens_per_s"] == pytest.approx(25.0)


def test_the_table_is_honest_about_its_estimate(write, capsys):
    assert main([write(OWN), "--model", "tiny", "--time-limit", "1"]) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"capacity, all users together: about [\d.]+ tokens/s \(estimated", " ".join(out.split())
    )


def test_people_read_no_names_of_algorithms(write, capsys):
    assert main([write(OWN), "--model", "tiny", "--time-limit", "1"]) == 0
    shown = capsys.readouterr()
    internals = "max flow|OR-Tools|chains|columns|master|gap|moved|keep|heuristic"
    assert not re.search(rf"\b({internals})\b", shown.out)
    assert not shown.err, "what it does is said on terminals alone"


def without(key: str) -> dict:
    return {k: v for k, v in OWN.items() if k != key}


MISTAKES = {
    "not JSON": ("{", "tiny", "not a cluster file"),
    "a list": ([], "tiny", "not a cluster file"),
    "no nodes": (without("nodes"), "tiny", "not a cluster file"),
    "other schema": ({**OWN, "schema": "x/9"}, "tiny", "schema 'x/9' is not known"),
    "other model": (OWN, "huge", "no model huge; it has tiny"),
    "twice": ({**OWN, "nodes": OWN["nodes"][:1] * 2}, "tiny", "node a is listed twice"),
    "a link to nowhere": ({**OWN, "links": [["a", "z", 1.0, 0.1]]}, "tiny", "names z"),
    "negative rate": (
        {**OWN, "nodes": [{"id": "a", "memory_bytes": 1, "tokens_per_s": {"tiny": [-1.0]}}]},
        "tiny",
        "not a cluster file",
    ),
    "no profile": (
        {**OWN, "nodes": [{"id": "a", "memory_bytes": 1, "tokens_per_s": {}}]},
        "tiny",
        "node a has no tokens_per_s for tiny",
    ),
    "no such uplink": (
        {**SHARED, "uplinks": {"away": {}}},
        "tiny",
        "node a is behind home, which is none of uplinks",
    ),
    "an uplink of less than nothing": (
        {**SHARED, "uplinks": {"home": {"up_bytes_per_s": -1.0}}},
        "tiny",
        "not a cluster file",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(name, write, capsys):
    content, model, expected = MISTAKES[name]
    assert main([write(content), "--model", model]) == 2
    err = capsys.readouterr().err
    assert expected in err
    assert err.count("\n") == 1


def test_a_missing_file_is_one_line(tmp_path, capsys):
    assert main([str(tmp_path / "none.json"), "--model", "m"]) == 2
    assert capsys.readouterr().err.startswith("error: cannot read ")


def test_too_small_a_cluster_says_what_is_missing(write, capsys):
    alone = {**OWN, "nodes": OWN["nodes"][:1], "links": []}
    assert main([write(alone), "--model", "tiny"]) == 2
    assert "the one peer here can hold at most 4 of 8 layers" in capsys.readouterr().err


def test_reading_raises_for_callers_too():
    with pytest.raises(UserError, match="not a cluster file"):
        read_cluster(b"\xff\xfe", "m")


def test_the_only_model_need_not_be_named(write, capsys):
    assert main([write(OWN), "--time-limit", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["flow_tokens_per_s"] == pytest.approx(30.0)
    two = {**OWN, "models": {**OWN["models"], "big": OWN["models"]["tiny"]}}
    assert main([write(two)]) == 2
    assert capsys.readouterr().err == (
        "error: the cluster file has 2 models, big, tiny: name one\n"
    )


@pytest.mark.parametrize("arguments", [[], ["c.json", "--time-limit", "-1"], ["c.json", "--what"]])
def test_wrong_arguments_are_one_line(arguments, capsys):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "--help lists what" in err


def test_help_says_what_the_estimate_is(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "estimate_tokens_per_s is what the plan would serve under full load" in " ".join(
        capsys.readouterr().out.split()
    )


def test_how_far_from_the_best_it_can_be_is_said_and_programs_get_the_search(write, capsys):
    assert main([write(OWN), "--time-limit", "2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"no plan serves more than [\d.]+ tokens/s", out)
    assert main([write(OWN), "--time-limit", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    done = answer["search"]
    assert done["columns"] > 0
    assert done["judged"] > 0
    assert done["master_solves"] > 0
    assert done["bound_tokens_per_s"] >= answer["estimate_tokens_per_s"]
    assert done["failed"] == ""


def test_without_or_tools_the_heuristics_place_and_it_is_said(write, capsys, monkeypatch):
    def fails(*_: object) -> None:
        raise RuntimeError("no license")

    monkeypatch.setattr(Master, "chosen", fails)
    assert main([write(OWN), "--time-limit", "2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "the search failed (RuntimeError: no license); simpler rules placed the layers" in out


def test_a_shared_uplink_is_read_and_counted_once(write, capsys):
    problem = read_cluster(json.dumps(SHARED).encode(), None)
    assert problem.uplinks == (SharedUplink(name="home", up_bytes_per_s=640.0),)
    assert [node.uplink for node in problem.nodes] == ["home", "home", "", ""]
    assert main([write(SHARED), "--time-limit", "2", "--json"]) == 0
    edges = json.loads(capsys.readouterr().out)["edges"]
    left = sum(flow for tail, head, flow in edges if tail in "ab" and head in "cd")
    assert left <= 10 * (1 + 1e-6)
    assert sum(flow for tail, _, flow in edges if tail == "source") > 30, "within homes all flows"


def test_people_read_what_holds_it_back_and_what_would_help(write, capsys):
    three = {**OWN, "nodes": OWN["nodes"][:2], "links": []}
    assert main([write(three), "--time-limit", "2"]) == 0
    out = capsys.readouterr().out
    said = " ".join(out.split())
    assert "All layers are equally narrow" in said
    assert "Without a, layers 0-3 have no holder, and answers stop." in said
    assert "Planned anew, one more peer like a would give +" in said
    assert "weights to fetch" in out


FORMAT = Path(__file__).parents[3] / "docs" / "cluster-format.schema.json"


def test_the_schema_accepts_what_is_read_and_refuses_what_is_not():
    validator = jsonschema.Draft202012Validator(json.loads(FORMAT.read_text()))
    data = Path(__file__).parents[3] / "bench" / "data" / "helix" / "clusters"
    files = sorted(data.glob("*.json"))
    assert files
    for good in (OWN, SHARED, HELIX, *(json.loads(path.read_text()) for path in files)):
        validator.validate(good)
    text = (FORMAT.parent / "cluster-format.md").read_text()
    example = json.loads(text.split("```json")[1].split("```")[0])
    validator.validate(example)
    assert read_cluster(json.dumps(example).encode(), None).model.layers == 8
    for wrong in (
        {},
        {**SHARED, "uplinks": {"home": {"up_bytes_per_s": -1.0}}},
        {**OWN, "nodes": []},
        {**OWN, "schema": "other"},
        {**OWN, "links": [["a", "b", -1.0, 0.01]]},
        {**OWN, "models": {"tiny": {"layers": 8}}},
    ):
        assert not validator.is_valid(wrong)


def test_peers_are_named_on_one_line_for_people_and_whole_in_json(write, capsys, monkeypatch):
    """Those of a living swarm by the end of their id, as everywhere."""
    peers = [Identity(bytes([number]) * 32).peer_id for number in range(4)]
    nodes = [{**OWN["nodes"][0], "id": peer} for peer in (*peers, "frankfurt-a100-node-1")]
    arguments = [write({**OWN, "nodes": nodes, "links": []}), "--time-limit", "1"]
    monkeypatch.setenv("COLUMNS", "80")
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert not any(peer in out for peer in peers)
    assert main([*arguments, "--json"]) == 0
    placed = json.loads(capsys.readouterr().out)["placement"]
    assert {peer if peer not in peers else peer[-8:] for peer in placed} <= set(
        re.findall(r"[\w-]+", out)
    )
    assert any(peer in placed for peer in peers)
