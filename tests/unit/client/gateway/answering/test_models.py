"""Which models a gateway opens, how many at a time, and whose text files it runs."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import client.gateway.__main__ as command
import client.gateway.answering.models as models_module
from client.errors import UnavailableError
from client.gateway.answering.models import FIGURES, GatewayModels, ModelsConfig, OpenModel
from client.gateway.errors import ApiError
from client.swarm.swarm import Swarm, SwarmConfig, model_beside, named_of
from client.text.tokenizer import ModelText
from dht.checkpoints.model_files import root_of
from dht.checkpoints.text_files import digest_of, text_hashes
from dht.errors import NetworkError, UserError
from dht.messages.types import ModelRecord, ModelSpec
from dht.records.directory import Directory
from node.links.text_server import ServedTexts, TextServer
from testing.network import MemoryNetwork, MemoryTransport
from tests.unit.client.gateway.waiting import until
from tests.unit.records import MODEL, record_of


class Opener:
    """Opens nothing, and remembers what it was asked for."""

    def __init__(self, broken: str = "") -> None:
        self.open: list[str] = []
        self.opened = 0
        self._broken = broken

    @asynccontextmanager
    async def __call__(self, name: str) -> AsyncIterator[OpenModel]:
        if name == self._broken:
            raise NetworkError("nobody answers")
        self.open.append(name)
        self.opened += 1
        try:
            await asyncio.sleep(0)
            nothing: Any = name
            yield OpenModel(swarm=nothing, service=nothing)
        finally:
            self.open.remove(name)


async def test_the_one_unused_for_longest_is_closed() -> None:
    opener = Opener()
    models = GatewayModels(tuple("abcd"), opener, open_max=2)
    for name in ("a", "b", "a", "c"):
        async with models.use(name):
            pass
    assert opener.open == ["a", "c"]
    async with models.use("a"), models.use("c"):
        with pytest.raises(ApiError, match="2 models are in use") as refused:
            async with models.use("d"):
                pass
        assert refused.value.status == 503
    async with models.use(None) as first:
        assert first.swarm == "a"
    assert opener.opened == 3
    await models.close()
    assert opener.open == []


async def test_many_requests_open_a_model_once() -> None:
    opener = Opener()
    models = GatewayModels(("a", "b"), opener, open_max=1)

    async def ask(name: str) -> str:
        while True:
            try:
                async with models.use(name) as model:
                    return str(model.swarm)
            except ApiError:
                await asyncio.sleep(0)

    assert await asyncio.gather(*map(ask, "aabbab")) == list("aabbab")
    assert len(opener.open) == 1
    await models.close()


def test_what_is_not_served_is_a_404_with_the_list() -> None:
    models = GatewayModels(("a", "b"), Opener())
    with pytest.raises(ApiError, match="'a', 'b' are") as refused:
        models.checked("c" * 5000)
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    assert len(refused.value.message) < 500
    listed = models.list()["data"]
    assert [each["id"] for each in listed] == ["a", "b"]
    assert [each["max_model_len"] for each in listed] == [None, None]
    assert all(each[figure] is None for each in listed for figure in FIGURES)


async def test_a_model_that_cannot_be_opened_is_tried_again() -> None:
    models = GatewayModels(("a", "b"), Opener(broken="b"))
    for _ in range(2):
        with pytest.raises(ApiError, match="nobody answers") as refused:
            async with models.use("b"):
                pass
        assert refused.value.status == 503
    async with models.use("a"):
        pass
    await models.close()


async def test_what_a_model_misses_is_looked_for_once_for_all_and_not_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[asyncio.Event] = []

    async def whole() -> OpenModel | None:
        looks.append(asyncio.Event())
        await looks[-1].wait()
        match len(looks):
            case 1:
                raise UnavailableError("nobody is there")
            case 2:
                return None
        return OpenModel(swarm=nothing, service=text)

    nothing: Any = "swarm"
    ids: Any = "token ids"
    text: Any = "texts"

    @asynccontextmanager
    async def opener(name: str) -> AsyncIterator[OpenModel]:
        yield OpenModel(swarm=nothing, service=ids, whole=whole)

    models = GatewayModels(("a",), opener)

    async def ask() -> str:
        try:
            async with models.ready("a") as model:
                return str(model.service)
        except ApiError as error:
            return f"{error.status}"

    async def asked_at_once() -> list[str]:
        before = len(looks)
        asking = [asyncio.create_task(ask()) for _ in range(3)]
        await until(lambda: len(looks) > before)
        looks[-1].set()
        return await asyncio.gather(*asking)

    assert await asked_at_once() == ["503"] * 3
    assert await asked_at_once() == ["token ids"] * 3
    assert (await ask(), len(looks)) == ("token ids", 2), "no peer had it a moment ago"
    monkeypatch.setattr(models_module, "MODELS", ModelsConfig(again_s=0.0))
    assert await asked_at_once() == ["texts"] * 3
    assert (await ask(), len(looks)) == ("texts", 3), "nothing is missing any more"
    await models.close()


# A stranger's text files

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
CATASTROPHIC = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"Regex": "(a|aa|a?)+$"},
        "behavior": "Isolated",
        "invert": False,
    },
    "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
}


async def announced(
    network: MemoryNetwork, directory: Path, when: str = "now"
) -> tuple[MemoryTransport, ModelSpec]:
    """A peer that serves a model with a hostile template and tokenizer, and says so."""
    (directory / "config.json").write_text('{"model_type": "m"}')
    (directory / "tokenizer.json").write_text(json.dumps(CATASTROPHIC))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": ENDLESS}))
    weights = digest_of({})
    spec = replace(MODEL, name="trap", root=root_of(text_hashes(directory), weights))
    peer = network.transport()
    await TextServer(peer, ServedTexts.of(directory, weights)).start()
    if when == "now":
        await publish(peer, spec)
    return peer, spec


async def publish(peer: MemoryTransport, spec: ModelSpec) -> None:
    record = record_of(peer.peer_id, 0, 8, model=spec, addresses=peer.addresses)
    await Directory(peer, "n", spec.key).publish(record)


@pytest.mark.parametrize("vouched", ["", "fingerprint", "named"])
def test_a_strangers_template_and_tokenizer_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vouched: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said: list[str] = []
    monkeypatch.setattr(command, "_say", said.append)

    async def taken() -> ModelText:
        network = MemoryNetwork(random.Random(0))
        (tmp_path / "model").mkdir()
        peer, spec = await announced(network, tmp_path / "model")
        config = SwarmConfig(
            network="n", fingerprint=spec.fingerprint if vouched == "fingerprint" else ""
        )
        named = (peer.peer_id,) if vouched == "named" else ("somebody else",)
        first = Swarm(network.transport(), ModelText(name="first"), config, named=named)
        entry = f"trap={spec.fingerprint[:16]}" if vouched == "fingerprint" else "trap"
        async with model_beside(first, entry, said.append) as swarm:
            await command.take_text(swarm)
            return swarm.text

    text = asyncio.run(taken())
    if vouched:  # its owner said that this is the one
        assert text.directory is not None
    else:
        assert (text.directory, text.tokenizer) == (None, None)
        assert "a stranger's tokenizer and template are not run here" in said[-1]


def test_a_gateway_that_was_started_before_its_peers_takes_their_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a power cut, when a machine starts everything at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said: list[str] = []
    monkeypatch.setattr(command, "_say", said.append)
    (tmp_path / "model").mkdir()

    async def scenario() -> list[Path | None]:
        network = MemoryNetwork(random.Random(0))
        peer, spec = await announced(network, tmp_path / "model", "later")
        config = SwarmConfig(network="n", fingerprint=spec.fingerprint, wait_s=0.0)
        text = ModelText(name="trap")
        async with Swarm.over(network.transport(), text, config) as swarm:
            await command.take_text(swarm)

            @asynccontextmanager
            async def opener(name: str) -> AsyncIterator[OpenModel]:
                directory: Any = lambda swarm: swarm.text.directory  # noqa: E731
                yield command.opened_as(swarm, directory)

            models, found = GatewayModels(("trap",), opener), []
            with pytest.raises(ApiError, match="nobody in network 'n' announces trap"):
                async with models.ready("trap"):
                    pass
            await publish(peer, spec)
            await swarm.reader.look()
            async with models.ready("trap") as model:
                found.append(model.service)
            await models.close()
        return found

    (directory,) = asyncio.run(scenario())
    assert directory is not None
    assert said[0] == "nobody in network n announces trap now; requests wait until somebody does"


def test_a_gateway_for_what_nobody_serves_says_what_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(command, "_say", said.append)

    async def taken() -> None:
        network = MemoryNetwork(random.Random(0))
        peer, spec = await announced(network, tmp_path)
        entry = ModelRecord(
            peer_id=peer.peer_id, model=spec, precision="float32", start=0, end=spec.layers
        )
        await Directory.of_models(peer, "n").publish(entry)
        config = SwarmConfig(network="n")
        async with Swarm.over(network.transport(), ModelText(name="llama"), config) as swarm:
            await command.take_text(swarm)

    asyncio.run(taken())
    assert said == [
        "nobody in network n announces llama now; it serves trap: name one of these with --model"
    ]


@pytest.mark.parametrize(
    ("entry", "name"),
    [("brook", "brook"), ("org/name", "org/name"), ("brook=" + "0" * 16, "brook")],
)
def test_a_model_is_named_in_one_word(entry: str, name: str) -> None:
    assert named_of(entry) == name


def test_a_fingerprint_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="no fingerprint"):
        named_of("brook=12")
