"""A model's text files from its peers: checked, bounded, kept, and what a lie comes to."""

import asyncio
import errno
import hashlib
import json
import math
import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from client.swarm.peer_texts import LIST, TEXTS, checked, fetched_texts
from dht.budget import TEXT_BYTES, TEXT_STREAMS, Budget
from dht.checkpoints.hub import TOOL_USE_TEMPLATE
from dht.checkpoints.model_files import root_of
from dht.checkpoints.text_files import digest_of, text_hashes
from dht.errors import NetworkError
from dht.messages import codec
from dht.messages.peer import (
    PEER_BOUNDS,
    TextFile,
    TextPiece,
    TextRequest,
    TextsFound,
    TextsRequest,
)
from dht.messages.session import Ping
from dht.process.home import passing_directory
from dht.transport.interface import TEXT_PROTOCOL, Stream, Transport
from node.links.text_server import ServedTexts, TextServer
from testing.network import MemoryNetwork
from tests.unit.records import record_of

WEIGHTS = digest_of({"model.safetensors": "0" * 64})


def model_in(
    directory: Path, *, tokenizer_bytes: int = 3 * PEER_BOUNDS.text_piece_bytes + 7
) -> ServedTexts:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text('{"model_type": "m", "torch_dtype": "float16"}')
    (directory / "tokenizer.json").write_bytes(bytes(range(256)) * (tokenizer_bytes // 256 + 1))
    (directory / "training.json").write_text("not passed on")
    return ServedTexts.of(directory, WEIGHTS)


async def from_peer(
    tmp_path: Path, serve: Callable[[Transport], TextServer | None], root: str
) -> Path:
    """The files that a client takes from one peer."""
    network = MemoryNetwork(random.Random(0))
    peer, client = network.transport(), network.transport()
    server = serve(peer)
    if server is not None:
        await server.start()
    nodes = {peer.peer_id: record_of(peer.peer_id, addresses=peer.addresses)}
    return await fetched_texts(client, root, nodes, tmp_path / "cache")


def test_a_client_has_what_the_peer_has(tmp_path: Path) -> None:
    texts = model_in(tmp_path / "model")
    kept = asyncio.run(from_peer(tmp_path, lambda peer: TextServer(peer, texts), texts.root))
    assert kept == tmp_path / "cache" / texts.root
    assert {path.name for path in kept.iterdir()} == {"config.json", "tokenizer.json", LIST}
    assert text_hashes(kept) == text_hashes(tmp_path / "model")
    assert json.loads((kept / "config.json").read_text()) == {"model_type": "m"}


def test_the_template_for_functions_comes_in_its_folder(tmp_path: Path) -> None:
    named = tmp_path / "model" / TOOL_USE_TEMPLATE
    named.parent.mkdir(parents=True)
    named.write_text("tools")
    texts = model_in(tmp_path / "model")
    kept = asyncio.run(from_peer(tmp_path, lambda peer: TextServer(peer, texts), texts.root))
    assert (kept / TOOL_USE_TEMPLATE).read_text() == "tools"
    assert asyncio.run(from_peer(tmp_path, lambda _: None, texts.root)) == kept


def test_what_is_kept_needs_no_peer_and_is_checked_again(tmp_path: Path) -> None:
    texts = model_in(tmp_path / "model")
    kept = asyncio.run(from_peer(tmp_path, lambda peer: TextServer(peer, texts), texts.root))
    assert asyncio.run(from_peer(tmp_path, lambda _: None, texts.root)) == kept
    (kept / "tokenizer.json").write_bytes(b"other")
    with pytest.raises(NetworkError):
        asyncio.run(from_peer(tmp_path, lambda _: None, texts.root))
    asyncio.run(from_peer(tmp_path, lambda peer: TextServer(peer, texts), texts.root))
    assert text_hashes(kept) == text_hashes(tmp_path / "model")


def test_other_text_files_than_the_fingerprint_has_are_refused(tmp_path: Path) -> None:
    honest = model_in(tmp_path / "model")
    lie = replace(model_in(tmp_path / "lie", tokenizer_bytes=512), root=honest.root)
    with pytest.raises(NetworkError, match="not those of the model's fingerprint"):
        asyncio.run(from_peer(tmp_path, lambda peer: TextServer(peer, lie), honest.root))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["../config.json", "/etc/passwd", "model.safetensors", LIST])
def test_a_list_names_no_other_files(name: str) -> None:
    sha256 = hashlib.sha256(b"").hexdigest()
    found = TextsFound(files=(TextFile(name=name, size_bytes=0, sha256=sha256),), weights=WEIGHTS)
    with pytest.raises(codec.MalformedError, match="no model passes on"):
        checked(found, root_of({name: sha256}, WEIGHTS))


def test_a_list_promises_no_more_than_is_taken() -> None:
    names = ("tokenizer.json", "tokenizer_config.json")
    files = tuple(
        TextFile(name=n, size_bytes=TEXTS.bytes_max // 2 + 1, sha256="0" * 64) for n in names
    )
    with pytest.raises(codec.MalformedError, match="more than"):
        checked(
            TextsFound(files=files, weights=WEIGHTS),
            root_of(dict.fromkeys(names, "0" * 64), WEIGHTS),
        )


@pytest.mark.parametrize("body", [b"", b"x" * (PEER_BOUNDS.text_piece_bytes + 1)])
def test_a_peer_that_sends_nothing_or_too_much_is_given_up(tmp_path: Path, body: bytes) -> None:
    texts = model_in(tmp_path / "model")

    class Liar(TextServer):
        async def _serve(self, stream: Stream) -> None:
            await codec.read_frame(stream)
            await codec.send_frame(stream, texts.found)
            while True:
                await codec.read_frame(stream)
                await codec.send_frame(stream, TextPiece(start=0), body)

    with pytest.raises(NetworkError, match="no peer gives"):
        asyncio.run(from_peer(tmp_path, lambda peer: Liar(peer, texts), texts.root))


# What a stranger may take


async def pieces_for_stranger(texts: ServedTexts, budget: Budget, streams: int) -> int:
    """How many pieces one stranger gets over some streams at once, one piece after another."""
    network = MemoryNetwork(random.Random(0))
    peer, stranger = network.transport(), network.transport()
    await TextServer(peer, texts, budget=budget).start()
    got, sha256 = 0, texts.found.files[-1].sha256
    opened = [await stranger.open_stream(peer.peer_id, TEXT_PROTOCOL) for _ in range(streams)]
    for stream in opened:
        for _ in range(8):
            try:
                await codec.send_frame(stream, TextRequest(sha256=sha256, start=0))
                await codec.read_frame(stream)
            except NetworkError:
                break
            got += 1
    return got


def test_a_stranger_takes_no_more_text_than_its_share(tmp_path: Path) -> None:
    texts = model_in(tmp_path / "model")
    slow = replace(TEXT_BYTES, per_s=1e-9, burst=3 * PEER_BOUNDS.text_piece_bytes)
    budget = Budget(slow)
    assert asyncio.run(pieces_for_stranger(texts, budget, 2)) == 3
    assert budget.refused == {"text_bytes": 2}
    assert math.isfinite(TEXT_BYTES.all_per_s)


def test_a_stranger_holds_few_streams_for_text(tmp_path: Path) -> None:
    texts = model_in(tmp_path / "model")
    budget = Budget()
    per_stream = 8
    got = asyncio.run(pieces_for_stranger(texts, budget, TEXT_STREAMS.per_peer + 3))
    assert got == TEXT_STREAMS.per_peer * per_stream
    assert budget.refused == {"text_streams": 3}


def test_what_is_no_request_for_text_ends_its_stream(tmp_path: Path) -> None:
    texts = model_in(tmp_path / "model")

    async def ask(message: object) -> object:
        network = MemoryNetwork(random.Random(0))
        peer, stranger = network.transport(), network.transport()
        await TextServer(peer, texts).start()
        stream = await stranger.open_stream(peer.peer_id, TEXT_PROTOCOL)
        await codec.send_frame(stream, message)
        return (await codec.read_frame(stream)).message

    with pytest.raises(NetworkError):
        asyncio.run(ask(Ping(nonce=1)))
    assert asyncio.run(ask(TextsRequest(root="0" * 64))) == TextsFound(files=())


@pytest.mark.parametrize("root", ["", "../../etc", "/etc", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_a_root_that_is_none_names_no_directory_here(root: str, tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match="is none"):
        asyncio.run(from_peer(tmp_path, lambda _: None, root))


@pytest.mark.parametrize("at", ["mkdtemp", "write_bytes", "replace"])
def test_a_cache_that_cannot_be_written_costs_the_client_nothing(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full or read-only, or another process that keeps the same files now."""
    texts, cache = model_in(tmp_path / "model"), tmp_path / "cache"
    owner = {"mkdtemp": tempfile, "write_bytes": Path, "replace": os}[at]
    works = getattr(owner, at)

    def fails(*given: Any, **named: Any) -> Any:
        if any(str(each).startswith(str(cache)) for each in (*given, *named.values())):
            raise OSError(errno.ENOSPC, "No space left on device")
        return works(*given, **named)

    monkeypatch.setattr(owner, at, fails)
    kept = asyncio.run(from_peer(tmp_path, lambda peer: TextServer(peer, texts), texts.root))
    assert text_hashes(kept) == text_hashes(tmp_path / "model")
    assert kept.parent == passing_directory(), "it goes with this process"
    assert not list(cache.iterdir())


@pytest.mark.parametrize("how", ["changed", "removed", "replaced with the same"])
def test_a_directory_that_changes_while_its_peer_runs(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients get what belongs to the loaded weights, or hear that it is gone; the owner, too."""
    texts = model_in(tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    data = path.read_bytes()
    path.unlink()
    if how != "removed":
        path.write_bytes(data if "same" in how else data[::-1])

    def ask() -> Path:
        return asyncio.run(from_peer(tmp_path, lambda peer: TextServer(peer, texts), texts.root))

    if "same" in how:
        assert text_hashes(ask()) == text_hashes(tmp_path / "model")
        return
    with pytest.raises(NetworkError, match=r"it no longer has the tokenizer\.json"):
        ask()
    assert f"{path}: " in caplog.text
    assert "Clients get it from this peer no more" in caplog.text
