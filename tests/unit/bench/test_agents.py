"""Every client that was tried does all that its template family can do."""

import json

from bench.agents.__main__ import GOOD
from testing.paths import ROOT


def test_every_client_does_all() -> None:
    result = json.loads((ROOT / "bench" / "results" / "agents.json").read_text())
    failed = {
        (client, family, name): said
        for client, row in result["cells"].items()
        for family, found in row.items()
        for name, said in found.items()
        if said not in GOOD
    }
    assert failed == {}
