"""What drafts for a model is told by its files."""

import argparse
import asyncio
import shutil
from pathlib import Path

import pytest

from dht.errors import UserError
from dht.messages.types import DeviceSpec
from node.device.hardware import Machine
from node.owner.reporter import Reporter
from node.peer.loading import Drafting, open_drafts
from node.weights.store import WeightStore
from tests.unit.node.engine.eagle import foretold_target, write_head

MACHINE = Machine(
    device=DeviceSpec(kind="cpu", name="cpu", memory_bytes=1 << 30),
    torch_device="cpu",
    free_bytes=1 << 30,
    lend_bytes=1 << 28,
)


def drafting(model: Path, draft: str | None) -> Drafting:
    arguments = argparse.Namespace(draft=draft, model=str(model), dtype="float32")
    store = WeightStore.open(str(model))
    reporter = Reporter(json_log=True)
    return asyncio.run(open_drafts(arguments, store, MACHINE, reporter))


def test_a_head_is_told_from_a_model_by_its_tensors(tmp_path: Path) -> None:
    model = foretold_target(tmp_path / "model")
    head = write_head(tmp_path / "head", model)
    for draft in (None, "none"):
        found = drafting(model, draft)
        assert found.engine is None
        assert found.head is None
    found = drafting(model, str(head))
    assert found.engine is None
    assert found.head is not None
    assert found.head.directory == head
    assert found.left(MACHINE) is MACHINE, "what a head takes depends on the layers"
    whole = drafting(model, str(model))
    assert whole.head is None
    assert whole.engine is not None
    assert whole.left(MACHINE).lend_bytes == MACHINE.lend_bytes - whole.engine.memory_bytes
    whole.engine.close()
    shutil.copytree(head, model / "draft")
    found = drafting(model, None)
    assert found.head is not None
    assert found.head.directory == model / "draft"
    assert drafting(model, "none").head is None


def test_what_is_neither_is_refused_where_it_was_named(tmp_path: Path) -> None:
    model = foretold_target(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError):
        drafting(model, str(tmp_path / "empty"))
    (model / "draft").mkdir()
    (model / "draft" / "config.json").write_text("{}")
    found = drafting(model, None)
    assert found == Drafting()
