"""docs/agents.md says what bench/results/agents.json holds."""

import json

from bench.agents.__main__ import GOOD, table
from testing.local_swarm import ROOT


def test_the_document_holds_the_measured_matrix_and_every_client_does_all() -> None:
    result = json.loads((ROOT / "bench" / "results" / "agents.json").read_text())
    assert table(result["cells"]) in (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    failed = {
        (client, family, name): said
        for client, row in result["cells"].items()
        for family, found in row.items()
        for name, said in found.items()
        if said not in GOOD
    }
    assert failed == {}
