"""The tests that the threat model names exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")


def test_every_row_names_a_test_and_every_test_exists() -> None:
    rows = [
        line
        for line in TEXT.partition("## Limits")[0].splitlines()
        if line.startswith("| ") and not line.startswith("| what a stranger does")
    ]
    defined = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(
            r"^ *(?:async )?def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    assert len(rows) > 30
    for row in rows:
        shown = re.findall(r"`([\w/.]+)`", row.split("|")[3])
        assert shown, row
        for name in shown:
            assert name in defined if name.startswith("test_") else (ROOT / name).exists(), name
