"""When a volunteer moves to another model, and whose word is not enough for that."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from dht.checkpoints.model_files import directory_root
from dht.messages.types import ModelRecord, NodeRecord
from dht.records.directory import Directory
from node.peer.roaming import RoamConfig, Roamer, turn_of
from testing.network import MemoryNetwork
from tests.unit.records import MODEL, record_of

BROOK = Path(__file__).parents[4] / "models" / "brook"


async def moved(root: str, holders: int, after_s: float, *, shown: bool = True) -> str:
    """The model that a volunteer moves to.

    Brook with this root has no holder. The volunteer's own model has this number of holders, which
    have ``shown`` that they hold it.
    """

    async def is_spare() -> bool:
        return shown

    network = MemoryNetwork(random.Random(0))
    peers = [network.transport() for _ in range(holders)]
    records: list[NodeRecord] = []
    for peer in peers:
        record = record_of(peer.peer_id, 0, 8, memory_bytes=1 << 40)
        await Directory(peer, "n", MODEL.key).publish(record)
        await Directory.of_models(peer, "n").publish(
            ModelRecord(peer_id=peer.peer_id, model=MODEL, start=0, end=8)
        )
        records.append(record)
    stranger = network.transport()
    brook = replace(MODEL, name="brook", root=root)
    await Directory.of_models(stranger, "n").publish(
        ModelRecord(peer_id=stranger.peer_id, model=brook)
    )
    roamer = Roamer(
        peers[0],
        Directory(peers[0], "n", MODEL.key),
        lambda: records[0],
        lambda need: None,
        is_spare,
        named=(),
        allowed=(str(BROOK), "m"),
        stays_s=0.0,
    )
    assert await roamer.look(100.0) is None
    need = await roamer.look(100.0 + after_s)
    return "" if need is None else need.model.name


CONFIG = RoamConfig()
LONG_S = CONFIG.lasts_s + CONFIG.turns_max * CONFIG.turn_s


def test_a_loss_must_last_and_the_own_model_stay_whole() -> None:
    root = directory_root(BROOK)
    assert asyncio.run(moved(root, 2, LONG_S)) == "brook"
    assert not asyncio.run(moved(root, 2, CONFIG.lasts_s - 1))
    assert not asyncio.run(moved(root, 1, LONG_S))
    assert not asyncio.run(moved(root, 2, LONG_S, shown=False))


@pytest.mark.parametrize("root", ["0" * 64, "", "f"])
def test_made_up_weights_draw_no_volunteer_away(root: str) -> None:
    assert not asyncio.run(moved(root, 2, LONG_S))


def test_volunteers_go_one_at_a_time() -> None:
    peers = [f"p{number}" for number in range(CONFIG.turns_max)]
    assert sorted(turn_of(peer, "m", peers) for peer in peers) == list(range(CONFIG.turns_max))
    crowd = [f"p{number}" for number in range(100)]
    assert max(turn_of(peer, "m", crowd) for peer in crowd) == CONFIG.turns_max
