"""``python -m coordinator.simulate``: what it prints, and one line for each mistake."""

import json
from pathlib import Path

import pytest

from coordinator.simulate import main, share, short_duration

CLUSTER = {
    "schema": "anabranch-cluster/1",
    "models": {
        "tiny": {
            "layers": 8,
            "layer_bytes": 1000,
            "kv_bytes_per_token_layer": 1,
            "activation_bytes": 64,
        }
    },
    "nodes": [
        {
            "id": name,
            "memory_bytes": 200_000,
            "profile": "toy",
            "tokens_per_s": {"tiny": [900.0, 450.0, 300.0, 200.0]},
        }
        for name in ("a", "b", "c")
    ],
    "profiles": {
        "toy": {
            "tiny": {
                "prefill_s": [[0, 0.0], [1000, 0.01]],
                "decode_s": [[0, 0.0], [1, 0.002], [64, 0.003]],
            }
        }
    },
    "default_rtt_s": 0.01,
}


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(CLUSTER))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


QUICK = ("--warm-up", 1, "--duration", 10)


@pytest.mark.parametrize("mode", [("--mode", "offline"), ("--mode", "online", "--rate", 300)])
def test_json_is_one_object_with_what_was_served(
    cluster: Path, capsys: pytest.CaptureFixture[str], mode: tuple[object, ...]
) -> None:
    code, out, _ = run(capsys, cluster, *QUICK, "--placement", "chain", "--json", *mode)
    report = json.loads(out)
    assert code == 0
    assert report["decode_tokens_per_s"] > 0
    assert 0 < max(use["busy"] for use in report["peers"].values()) <= 1
    assert "source>" in "".join(report["links"])


def test_a_placement_file_is_followed(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"placement": {"b": [0, 4], "c": [4, 8]}}))
    code, out, _ = run(capsys, cluster, *QUICK, "--placement", plan, "--json")
    assert code == 0
    assert set(json.loads(out)["peers"]) == {"b", "c"}


def test_routes_follow_the_edges_of_a_placement_file(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All flow over one of two peers that hold the same."""
    plan = tmp_path / "plan.json"
    for first in "ab":
        spans = {"a": [0, 4], "b": [0, 4], "c": [4, 8]}
        edges = [["source", first, 1.0], [first, "c", 1.0], ["c", "sink", 1.0]]
        plan.write_text(json.dumps({"placement": spans, "edges": edges}))
        code, out, _ = run(capsys, cluster, *QUICK, "--placement", plan, "--json")
        assert code == 0
        peers = json.loads(out)["peers"]
        assert {name for name, use in peers.items() if use["busy"] > 0} == {first, "c"}


def test_tables_for_people(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, cluster, *QUICK, "--placement", "chain")
    assert code == 0
    assert "tokens/s decoded" in out
    assert "next token" in out
    assert " ms" in out


def test_where_nothing_happened_the_tables_say_nothing(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = ("--mode", "online", "--rate", 1, "--warm-up", 0, "--duration", 2)
    code, out, _ = run(capsys, cluster, *quiet, "--placement", "chain")
    assert code == 0
    assert "No prompt ended in the 2 s measured" in out
    assert "0.000" not in out
    assert "waits on links" not in out
    (row,) = (line for line in out.splitlines() if "next token" in line)
    assert row.count("–") == 7


def test_times_and_shares_have_fitting_units() -> None:
    times = [short_duration(s) for s in (0.0, 4e-5, 2e-4, 0.0512, 0.138, 2.14, 75)]
    assert times == ["0", "40 µs", "200 µs", "51 ms", "138 ms", "2.1 s", "75 s"]
    assert [share(v) for v in (0.0, 0.003, 0.5, 1.0)] == ["–", "<1%", "50%", "100%"]


@pytest.mark.parametrize(
    ("placement", "says"),
    [
        ({"placement": {"x": [0, 8]}}, "no node of the cluster"),
        ({"placement": {"a": [0, 9]}}, "of 8 layers"),
        ({"placement": {"a": [0, 4]}}, "without a holder"),
        ({"spans": []}, "is no placement"),
        ({"placement": {"a": [0, 8]}, "edges": [["source", "z", 1.0]]}, "cannot carry flow"),
        ({"placement": {"a": [0, 8]}, "edges": [["source", "a", -1.0]]}, "is no placement"),
    ],
)
def test_a_wrong_placement_is_one_line(
    cluster: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    placement: object,
    says: str,
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(placement))
    code, out, err = run(capsys, cluster, "--placement", path)
    assert (code, out) == (2, "")
    assert says in err.splitlines()[-1]


def test_mistakes_are_one_line(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "trace.csv"
    empty.write_text("when,what\n1,2\n")
    broken = tmp_path / "broken.json"
    wrong = dict(CLUSTER, profiles={"toy": {"tiny": {"prefill_s": [[5, 1.0], [5, 2.0]]}}})
    broken.write_text(json.dumps(wrong))
    for arguments, says in (
        ((tmp_path / "none.json",), "cannot read"),
        ((cluster, "--mode", "online"), "needs --rate"),
        ((cluster, "--trace", empty), "not a trace"),
        ((cluster, "--model", "large"), "no model large"),
        ((cluster, "--scheduler", "best"), "'best' is not known: give one of anabranch"),
        ((broken,), "profiles cannot be read"),
    ):
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (2, "")
        assert says in err.splitlines()[-1]


def test_plot_writes_every_picture(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    pictures = tmp_path / "pictures"
    code, _, err = run(capsys, cluster, *QUICK, "--json", "--plot", pictures)
    assert code == 0, err
    names = {"tokens.png", "peers.png", "links.png", "latency.png", "flow.png"}
    assert {path.name for path in pictures.iterdir()} == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures.iterdir())
