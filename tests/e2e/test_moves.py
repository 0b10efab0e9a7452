"""Peers that leave or step aside while they serve: their sessions go on elsewhere, unnoticed."""

import asyncio
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from client import Swarm
from testing.forked import forked
from testing.local_swarm import LocalSwarm
from testing.reference import Reference, memory_for
from tests.e2e.conftest import MODEL

pytestmark = pytest.mark.e2e

PROMPT = "Once upon a time"
SPANS = ("0:4", "4:8", "0:4", "4:8")
NEW = 300


def test_a_leaving_peer_hands_its_sessions_over(reference: Reference) -> None:
    """First the answer's first stage leaves, and in the next answer its last one."""
    expected, _ = reference.greedy(reference.encode(PROMPT), NEW, ignore_eos=True)
    swarm = LocalSwarm(MODEL, extra=("--threads", "1"), start=forked)

    async def ask(stage: int) -> None:
        living = [peer for peer in swarm.peers if peer.process.poll() is None]
        async with Swarm.connect([peer.address for peer in living], model=str(MODEL)) as client:
            running = client.begin(PROMPT, max_new_tokens=NEW, ignore_eos=True)
            left, tokens = "", 0
            async for piece in running:
                tokens += len(piece.token_ids)
                if tokens >= 20 and not left:
                    left = running.route[stage].peer_id
                    gone = next(peer for peer in living if peer.peer_id == left)
                    gone.signal(signal.SIGINT)
            answer = running.answer()
        assert answer.token_ids == tuple(expected)
        assert left not in {s.peer_id for s in answer.route}
        assert answer.failovers == 0
        gone.wait_for("left")

    with swarm:
        for span in SPANS:
            swarm.start_peer(memory_gib=memory_for(MODEL) / 2**30, extra=("--layers", span))
        swarm.wait_serving()
        asyncio.run(ask(0))
        asyncio.run(ask(-1))


def test_a_peer_steps_aside_for_a_game_and_comes_back(reference: Reference, tmp_path: Path) -> None:
    expected, _ = reference.greedy(reference.encode(PROMPT), NEW, ignore_eos=True)
    sleep = shutil.which("sleep")
    assert sleep is not None
    game = tmp_path / "pretend-game"
    shutil.copy(sleep, game)
    swarm = LocalSwarm(MODEL, extra=("--threads", "1"), start=forked)
    players = ("--pause-on-process", game.name, "--calm", "1")

    def play() -> subprocess.Popen[bytes]:
        return subprocess.Popen([game, "600"])

    async def ask() -> subprocess.Popen[bytes]:
        started: list[subprocess.Popen[bytes]] = []
        async with Swarm.connect(swarm.addresses, model=str(MODEL)) as client:
            running = client.begin(PROMPT, max_new_tokens=NEW, ignore_eos=True)
            tokens = 0
            async for piece in running:
                tokens += len(piece.token_ids)
                if tokens >= 20 and not started:
                    started.append(play())
            assert running.answer().token_ids == tuple(expected)
            assert running.answer().failovers == 0
        return started[0]

    with swarm:
        for span in SPANS:
            plays = players if len(swarm.peers) < 2 else ()
            gib = memory_for(MODEL) / 2**30
            swarm.start_peer(memory_gib=gib, extra=("--layers", span, *plays))
        swarm.wait_serving()
        playing = asyncio.run(ask())
        try:
            for peer in swarm.peers[:2]:
                assert "pretend-game" in peer.wait_for("aside")["reason"]
        finally:
            playing.kill()
            playing.wait()
        for peer in swarm.peers[:2]:
            back = peer.wait_for("back")
            peer.wait_for("serving", since=peer.events.index(back))
        assert asyncio.run(ask_once(swarm)) == tuple(expected)


async def ask_once(swarm: LocalSwarm) -> tuple[int, ...]:
    """The answer of the swarm as it is now."""
    async with Swarm.connect(swarm.addresses, model=str(MODEL)) as client:
        return (await client.generate(PROMPT, max_new_tokens=NEW, ignore_eos=True)).token_ids
