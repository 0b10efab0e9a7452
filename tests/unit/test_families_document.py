"""docs/families.md says what bench/results/families.json holds."""

import json

from bench.families import every_family
from bench.families.outline import BEGIN, DOCUMENT, END, ROOT, table


def test_the_document_holds_the_measured_table() -> None:
    result = json.loads((ROOT / "bench" / "results" / "families.json").read_text())
    text = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert text.strip() == table(result).strip()
    assert len(result["families"]) > 20
    assert all(found["max_logit_error_float32"] < 1e-3 for found in result["families"].values())


def test_the_document_holds_what_came_of_every_family() -> None:
    """None is served wrongly: refused, or as transformers runs it."""
    result = json.loads((ROOT / "bench" / "results" / "every_family.json").read_text())
    text = DOCUMENT.read_text(encoding="utf-8").partition(every_family.BEGIN)[2]
    text = text.partition(every_family.END)[0]
    assert text.strip() == every_family.table(result).strip()
    found = [kind for kind, _ in result["families"].values()]
    assert found.count(every_family.SAME) > 50
    assert every_family.WRONG not in found
    assert every_family.FAILED not in found
