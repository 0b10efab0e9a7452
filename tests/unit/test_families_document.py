"""docs/families.md says what bench/results/families.json holds."""

import json

from bench.families import BEGIN, DOCUMENT, END, ROOT, table


def test_the_document_holds_the_measured_table() -> None:
    result = json.loads((ROOT / "bench" / "results" / "families.json").read_text())
    text = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert text.strip() == table(result).strip()
    assert len(result["families"]) > 20
    assert all(found["max_logit_error_float32"] < 1e-3 for found in result["families"].values())
