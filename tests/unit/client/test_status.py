"""``anabranch status`` and the page speak the words of those who ask and lend."""

from pathlib import Path
from typing import Any

import pytest

from client.health.state import _sentence
from client.status import screen

INTERNAL = ("chains by dp", "moved", "keep", "flow in", "held by", "planner", "replica")


def state(depth: int) -> dict[str, Any]:
    """What one look at a swarm of this many holders of each layer saw."""
    peer = {"counts": True, "start": 0, "end": 8, "id": "a", "name": "oak", "state": "serving",
            "flags": [], "tokens_per_s": 50.0, "gpu": "RTX 3090", "uptime_s": 7200.0}  # fmt: skip
    return {
        "swarm": {"model": "brook", "fingerprint": "ab" * 16, "sentence": "Healthy."},
        "probes": {"tpot_p50_s": 0.02, "ttft_p50_s": 0.5},
        "layers": {"count": 8, "replica_depth": depth},
        "plan": {
            "version": "1.1",
            "planner": "chains by dp, moved",
            "capacity_tokens_per_s": 957.0,
            "planned_for": "for an idle swarm",
        },
        "coordinator": {"name": "oak"},
        "peers": [peer],
        "help": "One more peer would help.",
        "weak_points": [],
    }


@pytest.mark.parametrize(("depth", "said"), [(1, "1 peer or more"), (2, "2 peers or more")])
def test_a_screen_has_no_internals_and_says_whose_capacity_it_is(depth: int, said: str) -> None:
    shown = screen(state(depth), "home")
    assert not [word for word in INTERNAL if word in shown]
    assert "capacity: about 957.0 tokens/s, all users together" in shown
    assert f"layers: 8, each on {said}" in shown


def test_a_row_at_its_longest_fits_80_columns_with_all_that_tells_peers_apart() -> None:
    seen = state(1)
    seen["peers"] = [
        {**seen["peers"][0], "name": name, "state": "silent", "flags": ["lying"], "start": 100,
         "end": 128, "gpu": "NVIDIA GeForce RTX 3090 Ti", "tokens_per_s": 12345.6}
        for name in ("DESKTOP-AB aaaaaaaa", "DESKTOP-AB aaaaaaab", "x" * 32)
    ]  # fmt: skip
    seen["peers"][0] |= {"state": "serving", "flags": [], "uptime_s": 3540.0, "tokens_per_s": 0.44}
    _, table, _ = screen(seen, "home").split("\n\n")
    head, first, *rest = table.split("\n")
    assert all(len(line) <= 80 for line in table.split("\n"))
    assert head.split() == ["Name", "State", "Layers", "GPU", "tokens/s", "Up"]
    assert first == (
        "DESKTOP-AB aaaaaaaa serving       100–127 NVIDIA GeForce RTX 3090     0.4 59 min"
    )
    assert rest[0].startswith("DESKTOP-AB aaaaaaab not answering 100–127 ")
    assert rest[0].endswith(" 12346      –")
    assert rest[1] == "    announces layers that it does not answer for"


def test_the_page_names_no_planner() -> None:
    import client.health

    page = Path(client.health.__file__).with_name("templates") / "page.html"
    assert "planner" not in page.read_text().lower()
    assert "all users together" in page.read_text()


@pytest.mark.parametrize(
    ("depths", "serving", "said"),
    [
        ([1, 1], 1, "every layer is on the one serving peer"),
        ([2, 2], 2, "every layer is on both serving peers"),
        ([3, 3], 3, "every layer is on all 3 serving peers"),
        ([1, 2], 3, "every layer is on at least 1 of 3 serving peers"),
    ],
)
def test_how_many_hold_each_layer_is_plain(depths: list[int], serving: int, said: str) -> None:
    peers = [{"counts": True, "state": "serving"}] * serving
    assert _sentence([], peers, depths, {"ttft_p50_s": None}).startswith(said)
