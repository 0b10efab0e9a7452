"""Which model of a network a peer without one takes, and who decides on that."""

import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dht.errors import SwarmError, UserError
from dht.messages.types import ModelRecord, ModelSpec
from dht.records.directory import Directory
from node.peer import join_options
from node.peer.choosing import Choice, agreed, choices, files_of
from node.peer.first_steps import BUNDLED
from testing.network import MemoryNetwork
from tests.unit.records import MODEL, record_of

RARE = replace(MODEL, name="org/rare")
OFTEN = replace(MODEL, name="org/often")
PLENTY = 1 << 30


async def found(
    models: Sequence[tuple[ModelSpec, int]],
    allowed: Sequence[str] = (),
    memory: int = PLENTY,
    said: tuple[str, str] = ("", ""),
    told: str = "float32",
    precision: str = "float32",
) -> tuple[Choice, ...]:
    """The choices in a network where this number of peers serves each of these models."""
    network = MemoryNetwork(random.Random(0))
    for spec, holders in models:
        for _ in range(holders):
            peer = network.transport()
            entry = ModelRecord(
                peer_id=peer.peer_id, model=spec, precision=told, start=0, end=spec.layers
            )
            await Directory.of_models(peer, "n").publish(entry)
            record = record_of(peer.peer_id, 0, spec.layers, model=spec)
            await Directory(peer, "n", spec.key).publish(record)
    asker = network.transport()
    return await choices(asker, "n", (), memory, allowed, precision=precision, said=said)


def test_it_goes_where_holders_are_fewest_and_the_owner_allows() -> None:
    both = asyncio.run(found([(OFTEN, 2), (RARE, 1)]))
    assert [each.files for each in both] == ["org/rare", "org/often"]
    (allowed,) = asyncio.run(found([(OFTEN, 2), (RARE, 1)], ("org/often",)))
    assert allowed.files == "org/often"
    assert "about" in allowed.sentence()


def test_files_of_the_bundled_model_are_here_and_nobody_elses_are_taken_for_them() -> None:
    assert files_of("brook", ()) == str(BUNDLED)
    assert files_of("brook", ("org/name",)) is None
    with pytest.raises(UserError, match="files here have other weights"):
        asyncio.run(found([(replace(MODEL, name="brook"), 1)]))


def test_why_there_is_no_choice() -> None:
    with pytest.raises(SwarmError, match="announces no model"):
        asyncio.run(found([]))
    with pytest.raises(UserError, match=r"org/rare.*lend more"):
        asyncio.run(found([(RARE, 1)], memory=1))
    with pytest.raises(UserError, match="allows none"):
        asyncio.run(found([(RARE, 1)], ("org/other",)))
    with pytest.raises(UserError, match=r"not here.*get them from.*--model.*org/name"):
        asyncio.run(found([(MODEL, 1)]))


def test_an_invitation_vouches_for_the_weights_under_its_models_name() -> None:
    forged = replace(RARE, root="f" * 64)
    both = [(OFTEN, 2), (RARE, 2), (forged, 1)]
    free = asyncio.run(found(both))
    assert free[0].need.model.root == forged.root
    said = (RARE.name, RARE.fingerprint[:32])
    held = asyncio.run(found(both, said=said))
    assert {each.need.model.root for each in held} == {OFTEN.root, RARE.root}
    with pytest.raises(UserError, match="other weights"):
        asyncio.run(found([(forged, 1)], said=said))


def test_what_fits_depends_on_the_own_precision_and_what_is_fetched_does_not() -> None:
    spec = replace(RARE, layer_bytes=1 << 20, embed_bytes=0, head_bytes=0, layers=8)
    spec = replace(spec, kv_bytes_per_token_layer=0)
    memory = 2 << 20

    def counted(told: str, precision: str) -> int:
        (one,) = asyncio.run(found([(spec, 1)], memory=memory, told=told, precision=precision))
        count = one.need.end - one.need.start
        assert one.fetch_bytes == pytest.approx(count << 20, rel=0.01), "as it is published"
        return count

    assert counted("bfloat16", "bfloat16") == 2
    assert counted("bfloat16", "int8 in bfloat16") == 4
    assert counted("bfloat16", "int4 in bfloat16") == 7
    with pytest.raises(UserError, match="--quantize"):
        counted("int4 in bfloat16", "float32")
    assert counted("bfloat16", "a stranger's word") == 2


def test_a_network_names_no_files_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "rare").mkdir(parents=True)
    assert files_of("org/rare", ()) is None
    assert files_of("rare", ("org/rare",)) == "org/rare"
    assert files_of("rare", ()) is None


def test_nothing_is_fetched_before_the_owner_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    both = asyncio.run(found([(OFTEN, 2), (RARE, 1)]))
    assert asyncio.run(agreed(both, yes=True)) is both[0]
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    with pytest.raises(UserError, match=r"--model, .*--models and add --yes"):
        asyncio.run(agreed(both, yes=False))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--yes", "--initial-peers", "/ip4/1.2.3.4"), "--yes goes with --models"),
        (("--model", "a", "--models", "b"), "give one"),
        (("--gpu", "0,1", "--models", "b"), "which model"),
    ],
)
def test_what_must_be_said(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANABRANCH_MEMORY", "")
    monkeypatch.delenv("ANABRANCH_PEERS", raising=False)
    monkeypatch.setattr(sys, "argv", ["join", *words])
    with pytest.raises(UserError, match=said):
        join_options.parse()
