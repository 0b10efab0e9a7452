"""What makes the tests of engines quick goes on doing so."""

from pathlib import Path

from testing.tiny_families import make
from tests.unit.node.engines import opened


def test_models_of_one_configuration_share_what_is_found_of_them(tmp_path: Path) -> None:
    for name in ("one", "other"):
        make(tmp_path / name, "llama")
    one, other = (opened(tmp_path / name).layout.structure for name in ("one", "other"))
    assert one is other
