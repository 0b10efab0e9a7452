"""The libp2p transport with real daemons on loopback."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest

from dht.daemon import transport
from dht.daemon.kademlia import RPC_LIMIT_S, RecordProtocol
from dht.daemon.transport import HivemindTransport
from dht.errors import MachineError, NetworkError, PeerError, UserError
from dht.identity.peer_id import Identity
from dht.messages import codec
from dht.process.supervision import FAILURES_MAX
from dht.records.signed import sign_record
from dht.transport.config import TransportConfig
from dht.transport.interface import Stream
from tests.e2e.light_streams import LAST, hear, last_word
from tests.unit.records import record_of

pytestmark = pytest.mark.e2e
KEY = "test/model/nodes"
ECHO = "/test/echo/1"
ROOT = Path(__file__).resolve().parents[2]


async def start(*peers: HivemindTransport, client_mode: bool = False) -> HivemindTransport:
    return await HivemindTransport.create(
        TransportConfig(
            identity=Identity.generate(),
            host="127.0.0.1",
            client_mode=client_mode,
            initial_peers=tuple(peer.addresses[0] for peer in peers),
        )
    )


@contextlib.asynccontextmanager
async def swarm(count: int) -> AsyncIterator[list[HivemindTransport]]:
    transports = [await start()]
    try:
        for _ in range(count - 1):
            transports.append(await start(transports[0]))
        yield transports
    finally:
        await asyncio.gather(*(t.close() for t in transports))


async def eventually(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  (the state of processes sets no event)
            await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # before it is read, or meanwhile
        return False
    # A killed daemon may stay as a zombie until init collects it.
    return stat.rpartition(")")[2].split()[0] != "Z"


def left_behind() -> list[str]:
    """Daemons and socket directories of this process."""
    owners = Path(tempfile.gettempdir()).glob("anabranch-p2p-*/owner")
    found = [str(path) for path in owners if path.read_text() == str(os.getpid())]
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return found + [c for c in children if "p2pd" in Path(f"/proc/{c}/comm").read_text()]


async def echo(stream: Stream) -> None:
    while True:
        stream.write(await stream.read_exactly(1 << 16))
        await stream.drain()


def run_on(loop: str, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    if loop == "uvloop":
        uvloop = pytest.importorskip("uvloop")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(body())
    else:
        asyncio.run(body())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_three_peers_share_records_and_streams(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with swarm(3) as peers:
            for number, peer in enumerate(peers):
                value = f"value {number}".encode()
                assert await peer.store(KEY, value, expires_unix_s=peer.now() + 60)
            expected = {p.peer_id: f"value {n}".encode() for n, p in enumerate(peers)}
            for peer in peers:
                assert await peer.get(KEY) == expected
            # Renewed at once: the newest wins everywhere.
            assert await peers[0].store(KEY, b"newer", expires_unix_s=peers[0].now() + 60)
            expected[peers[0].peer_id] = b"newer"
            for peer in peers:
                assert await peer.get(KEY) == expected

            await peers[1].serve(ECHO, echo)
            data = random.Random(1).randbytes(1 << 20)
            # The second and third know of each other through the first only.
            for opener in (peers[2], peers[0], peers[1]):
                stream = await opener.open_stream(peers[1].peer_id, ECHO)
                assert stream.remote_peer_id == peers[1].peer_id

                async def send(to: Stream) -> None:
                    for start in range(0, len(data), 1 << 16):
                        to.write(data[start : start + (1 << 16)])
                        await to.drain()

                async with asyncio.TaskGroup() as group:
                    group.create_task(send(stream))
                    assert await stream.read_exactly(len(data)) == data
                await stream.close()
                await stream.close()
            await eventually(lambda: peers[1].stream_errors["NetworkError"] == 3)

    with caplog.at_level(logging.INFO):
        run_on(loop, body)
    assert not [r for r in caplog.records if r.name != "asyncio"]


async def test_client_reads_without_listening() -> None:
    async with swarm(2) as peers:
        await peers[1].store(KEY, b"there", expires_unix_s=peers[1].now() + 60)
        await peers[1].serve(ECHO, echo)
        client = await start(peers[0], client_mode=True)
        try:
            assert client.addresses == ()
            assert await client.get(KEY) == {peers[1].peer_id: b"there"}
            assert await client.store(KEY, b"mine", expires_unix_s=client.now() + 60)
            assert (await peers[0].get(KEY))[client.peer_id] == b"mine"
            stream = await client.open_stream(peers[1].peer_id, ECHO, addresses=peers[1].addresses)
            stream.write(bytes(1 << 16))
            assert len(await stream.read_exactly(1 << 16)) == 1 << 16
        finally:
            await client.close()


async def test_forged_records_neither_appear_nor_replace() -> None:
    from hivemind.dht.node import DHTNode

    async with swarm(2) as peers:
        owner = peers[0]
        await owner.store(KEY, b"true", expires_unix_s=owner.now() + 60)
        attacker = await DHTNode.create(initial_peers=[owner.addresses[0]])
        try:
            until_s = owner.now() + 100
            forger = Identity.generate()
            forged = sign_record(forger, KEY, b"forged", until_s)
            other_key = sign_record(forger, "test/other/nodes", b"moved", until_s)
            plain = {"exclude_self": True}
            for subkey, value in (
                (None, b"plain value"),
                (owner.peer_id, b"unsigned"),
                (owner.peer_id, forged),
                (forger.peer_id, other_key),
                (forger.peer_id, "text"),
                (7, forged),
            ):
                assert not await attacker.store(KEY, value, until_s, subkey=subkey, **plain)
            # Signed well, but said to last longer than signed, and for ever.
            for expires_s in (until_s + 1, float("inf")):
                stored = await attacker.store(
                    KEY, forged, expires_s, subkey=forger.peer_id, **plain
                )
                assert not stored
            for peer in peers:
                assert await peer.get(KEY) == {owner.peer_id: b"true"}
                assert peer.rejected_records.total() > 0
            # An honest record from a stock node is one like any other.
            assert await attacker.store(KEY, forged, until_s, subkey=forger.peer_id, **plain)
            assert (await peers[1].get(KEY))[forger.peer_id] == b"forged"
        finally:
            await attacker.shutdown()


async def test_one_bad_entry_does_not_hide_the_others() -> None:
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DictionaryDHTValue

    async with swarm(2) as peers:
        await peers[0].store(KEY, b"true", expires_unix_s=peers[0].now() + 60)
        # What a malicious replica would answer: a forged entry, lasting for ever.
        storage = peers[0]._node.protocol.storage
        held = storage.get(DHTID.generate(source=KEY)).value
        assert isinstance(held, DictionaryDHTValue)
        held.store(Identity.generate().peer_id, b"forged", float("inf"))
        assert await peers[1].get(KEY) == {peers[0].peer_id: b"true"}


def test_dead_addresses_are_named_at_once_or_within_the_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    peer_id = Identity.generate().peer_id

    async def joined(address: str, limit_s: float) -> None:
        with pytest.raises(NetworkError, match=peer_id):
            await HivemindTransport.create(
                TransportConfig(
                    identity=Identity.generate(),
                    client_mode=True,
                    initial_peers=(address,),
                    connect_timeout_s=limit_s,
                )
            )

    async def body(silent: str) -> None:
        refused = f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id}"
        patient = asyncio.create_task(joined(silent, 600.0))
        await asyncio.gather(joined(refused, 600.0), joined(silent, 3.0))
        assert not patient.done(), "each waits for its own limit, and for a refusal not even that"
        patient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await patient

    with socket.socket() as listening:  # takes connections and says nothing
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        asyncio.run(body(f"/ip4/127.0.0.1/tcp/{listening.getsockname()[1]}/p2p/{peer_id}"))
    assert not [r for r in caplog.records if r.levelno > logging.DEBUG and r.name != "asyncio"]


@pytest.mark.parametrize(
    "address",
    ["nonsense", "/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/1/p2p/xyz", "/ip4/1.2.3/tcp/1", ""],
)
def test_bad_addresses_are_the_users_mistake(address: str) -> None:
    config = TransportConfig(identity=Identity.generate(), initial_peers=(address,))
    with pytest.raises(UserError, match="address"):
        asyncio.run(HivemindTransport.create(config))


@pytest.mark.parametrize(
    ("host", "port"), [("here", 0), ("192.0.2.200", 0), ("127.0.0.1", 65536), ("127.0.0.1", -1)]
)
def test_bad_places_to_listen_are_the_users_mistake(host: str, port: int) -> None:
    config = TransportConfig(identity=Identity.generate(), host=host, port=port)
    with pytest.raises(UserError, match="cannot listen on"):
        asyncio.run(HivemindTransport.create(config))


async def test_a_taken_port_is_the_users_mistake() -> None:
    first = await start()
    try:
        port = int(first.addresses[0].split("/")[4])
        config = TransportConfig(identity=Identity.generate(), host="127.0.0.1", port=port)
        with pytest.raises(UserError, match=str(port)):
            await HivemindTransport.create(config)
    finally:
        await first.close()


async def test_a_busy_peer_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answering = RecordProtocol.rpc_ping

    async def late(self: RecordProtocol, *asked: Any) -> Any:
        await asyncio.sleep(RPC_LIMIT_S + 0.5)
        return await answering(self, *asked)

    founder = await start()
    try:
        monkeypatch.setattr(RecordProtocol, "rpc_ping", late)
        await (await start(founder)).close()
        monkeypatch.setattr(transport, "OPEN_LIMIT_S", RPC_LIMIT_S)
        with pytest.raises(NetworkError, match="did not answer within 3 s"):
            await start(founder)
    finally:
        await founder.close()


async def test_stream_to_oneself_and_to_nobody() -> None:
    async with swarm(2) as peers:
        await peers[0].serve(ECHO, echo)
        stream = await peers[0].open_stream(peers[0].peer_id, ECHO)
        stream.write(bytes(1 << 20))
        assert await stream.read_exactly(1 << 20) == bytes(1 << 20)
        await stream.close()
        with pytest.raises(NetworkError, match="does not serve"):
            await peers[0].open_stream(peers[0].peer_id, "/nothing/1")
        with pytest.raises(NetworkError, match=peers[1].peer_id):
            await peers[0].open_stream(peers[1].peer_id, "/nothing/1")
        stranger = Identity.generate().peer_id
        with pytest.raises(NetworkError, match=stranger):
            await peers[0].open_stream(
                stranger, ECHO, addresses=(f"/ip4/127.0.0.1/tcp/1/p2p/{stranger}",)
            )
        with pytest.raises(NetworkError):
            await peers[0].open_stream("no peer id", ECHO)


def test_a_failing_handler_ends_its_stream_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(stream: Stream) -> None:
        kind = await stream.read_exactly(1)
        if kind == b"p":
            raise PeerError("bad bytes")
        raise ZeroDivisionError("a fault of ours")

    async def body() -> None:
        async with swarm(2) as peers:
            await peers[0].serve("/test/fail/1", fail)
            for kind in (b"p", b"z"):
                stream = await peers[1].open_stream(peers[0].peer_id, "/test/fail/1")
                stream.write(kind)
                await stream.drain()
                with pytest.raises(NetworkError):
                    await stream.read_exactly(1)
            assert peers[0].stream_errors == {"PeerError": 1, "ZeroDivisionError": 1}

    asyncio.run(body())
    assert "a fault of ours" in caplog.text
    assert "PeerError" not in caplog.text


async def test_a_protocol_that_is_served_again_has_a_new_handler() -> None:
    async def says(word: bytes, stream: Stream) -> None:
        stream.write(word)
        await stream.drain()
        await stream.close()

    async with swarm(2) as (here, there):
        for word in (b"first", b"again"):
            await there.serve(ECHO, functools.partial(says, word))
            stream = await here.open_stream(there.peer_id, ECHO)
            assert await stream.read_exactly(5) == word
            await stream.close()


async def test_a_registration_whose_answer_was_lost_can_be_made_again() -> None:
    """Such as one that ran out of descriptors half way: the daemon has a handler already."""
    async with swarm(2) as (here, there):
        register = there._p2p.add_binary_stream_handler

        async def half(*given: Any) -> None:
            await register(*given)
            raise OSError(24, "Too many open files")

        there._p2p.add_binary_stream_handler = half
        with pytest.raises(NetworkError, match="Too many open files"):
            await there.serve(ECHO, echo)
        there._p2p.add_binary_stream_handler = register
        await there.serve(ECHO, echo)
        stream = await here.open_stream(there.peer_id, ECHO)
        stream.write(bytes(1 << 16))
        assert await stream.read_exactly(1 << 16) == bytes(1 << 16)
        await stream.close()


@pytest.mark.parametrize("times", [1, 3])
def test_a_loop_of_the_transport_that_fails_is_set_up_again_or_ends_the_peer(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        left, worked = times, asyncio.Event()

        async def read(self: HivemindTransport) -> None:
            nonlocal left
            if left:
                left -= 1
                raise ValueError("an address that nobody foresaw")
            worked.set()

        async with swarm(1) as (peer,):
            monkeypatch.setattr(HivemindTransport, "_read_addresses", read)
            async with asyncio.timeout(60):
                if times < FAILURES_MAX:
                    await worked.wait()
                    assert peer._config.parts.failures == {
                        "HivemindTransport._keep_addresses": times
                    }
                else:
                    with pytest.raises(MachineError, match=r"_keep_addresses failed 3 times"):
                        await peer.wait_ended()

    monkeypatch.setattr(transport, "ADDRESSES_PERIOD_S", 0.05)
    monkeypatch.setattr("dht.process.supervision.RESTART_S", 0.05)
    asyncio.run(body())


@pytest.mark.parametrize("client", [False, True], ids=["peer", "client"])
def test_a_transport_looks_at_its_addresses_again_and_again(
    client: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A client listens nowhere, so it has none; a peer may have none while its network is gone."""

    async def body() -> None:
        async with swarm(1) as (peer,):
            one = await start(peer, client_mode=client)
            try:
                asked, known = asyncio.Event(), one.addresses
                identify, looks = one._p2p._client.identify, 0

                async def told() -> Any:
                    nonlocal looks
                    looks += 1
                    peer_id, found = await identify()
                    if looks > 2 * FAILURES_MAX:
                        asked.set()
                    return peer_id, () if looks <= FAILURES_MAX else found

                monkeypatch.setattr(one._p2p._client, "identify", told)
                async with asyncio.timeout(60):
                    await asked.wait()
                assert one.addresses == known
                assert one._config.parts.failures == {}
                assert await one.get(KEY) == {}
            finally:
                await one.close()

    monkeypatch.setattr(transport, "ADDRESSES_PERIOD_S", 0.02)
    monkeypatch.setattr("dht.process.supervision.RESTART_S", 0.02)
    asyncio.run(body())
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.mark.parametrize("client", [False, True], ids=["peer", "client"])
def test_a_daemon_that_was_stopped_ends_its_process(
    client: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        async with swarm(1) as (peer,):
            one = await start(peer, client_mode=client)
            os.kill(one.daemon_pid, signal.SIGSTOP)
            try:
                async with asyncio.timeout(60):
                    with pytest.raises(MachineError, match="no longer answers"):
                        await one.wait_ended()
            finally:
                os.kill(one.daemon_pid, signal.SIGCONT)
                await one.close()

    monkeypatch.setattr(transport, "ADDRESSES_PERIOD_S", 0.02)
    monkeypatch.setattr(transport, "OPEN_LIMIT_S", 0.5)
    asyncio.run(body())


async def test_a_slow_reader_holds_the_writer_back() -> None:
    released = asyncio.Event()

    async def wait(stream: Stream) -> None:
        await released.wait()
        await stream.read_exactly(1)

    async with swarm(2) as peers:
        await peers[0].serve("/test/wait/1", wait)
        stream = await peers[1].open_stream(peers[0].peer_id, "/test/wait/1")
        written = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                while written < 256 << 20:
                    stream.write(bytes(1 << 20))
                    await stream.drain()
                    written += 1 << 20
        assert written < 64 << 20
        await stream.close()  # not held up by what nobody reads
        released.set()


async def test_the_last_word_of_who_goes_is_heard() -> None:
    async with swarm(2) as (a, b):
        await b.serve(LAST, last_word)
        await hear(lambda: a.open_stream(b.peer_id, LAST))


async def test_nothing_is_left_after_close() -> None:
    peer = await start()
    pid, directory = peer.daemon_pid, peer._control_path.parent
    assert alive(pid)
    assert os.getpgid(pid) != os.getpgid(0)  # Ctrl-C reaches us alone
    assert directory.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in directory.iterdir() if p.name == "identity"] == []
    await peer.close()
    await peer.close()
    assert not alive(pid)
    assert not directory.exists()
    for use in (peer.get(KEY), peer.open_stream("x", ECHO), peer.serve(ECHO, echo)):
        with pytest.raises(NetworkError, match="left"):
            await use
    assert len(asyncio.all_tasks()) == 1


async def test_a_founder_that_comes_back_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dht.daemon.transport.REJOIN_PERIOD_S", 0.5)

    identity = Identity.generate()
    founder = await start()
    port = int(founder.addresses[0].split("/")[4])
    await founder.close()
    config = TransportConfig(identity=identity, host="127.0.0.1", port=port)
    founder = await HivemindTransport.create(config)
    others = [await start(founder), await start(founder)]
    try:
        await founder.close()
        assert await others[0].store(KEY, b"on", expires_unix_s=founder.now() + 60)
        assert await others[1].get(KEY) == {others[0].peer_id: b"on"}
        founder = await HivemindTransport.create(config)  # knows nobody
        async with asyncio.timeout(40):
            while not await founder.get(KEY):
                await others[0].store(KEY, b"on", expires_unix_s=founder.now() + 60)
                await asyncio.sleep(0.1)
    finally:
        await asyncio.gather(*(t.close() for t in (founder, *others)))


async def test_who_was_met_is_greeted_again_though_the_founder_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two peers that met through a founder lose each other, as in a cut of over a minute."""
    monkeypatch.setattr("dht.daemon.transport.REJOIN_PERIOD_S", 0.5)

    founder = await start()
    one, other_identity = await start(founder), Identity.generate()
    other = await HivemindTransport.create(
        TransportConfig(
            identity=other_identity, host="127.0.0.1", initial_peers=(founder.addresses[0],)
        )
    )
    port = int(other.addresses[0].split("/")[4])

    async def seen(reader: HivemindTransport, author: HivemindTransport) -> None:
        """Until the reader has a fresh record of the author."""
        record = record_of(author.peer_id, 0, 8, addresses=author.addresses)
        async with asyncio.timeout(60):
            while author.peer_id not in await reader.get(KEY):
                until_s = author.now() + 2
                await author.store(KEY, codec.encode(record), expires_unix_s=until_s)
                await asyncio.sleep(0.1)

    try:
        await seen(one, other)
        await founder.close()
        await other.close()
        async with asyncio.timeout(60):
            heard: Mapping[str, bytes] = {other.peer_id: b""}
            while other.peer_id in heard:
                await asyncio.sleep(0.1)
                heard = await one.get(KEY)
        other = await HivemindTransport.create(  # it comes back, and knows nobody
            TransportConfig(identity=other_identity, host="127.0.0.1", port=port)
        )
        await seen(other, one)
        await seen(one, other)
    finally:
        await asyncio.gather(*(t.close() for t in (one, other)))


async def test_who_cannot_be_dialled_is_not_dialled_again_at_once_unless_it_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each failed dial has the daemon ask all others where the peer is."""
    monkeypatch.setattr("dht.daemon.transport.AGAIN_S", 600.0)

    asker = await start()
    initial, host = (asker.addresses[0],), "127.0.0.1"
    config = TransportConfig(identity=Identity.generate(), host=host, initial_peers=initial)
    asked = await HivemindTransport.create(config)
    try:
        where = asked.addresses
        config = dataclasses.replace(config, port=int(where[0].split("/")[4]))
        await asker.serve(ECHO, echo)
        await asked.close()
        with pytest.raises(NetworkError) as first:
            await asker.open_stream(asked.peer_id, ECHO, addresses=where)
        assert "a moment ago" not in str(first.value)
        with pytest.raises(NetworkError, match="a moment ago"):
            await asker.open_stream(asked.peer_id, ECHO, addresses=where)
        asked = await HivemindTransport.create(config)
        await asked.serve(ECHO, echo)
        stream = await asked.open_stream(asker.peer_id, ECHO, addresses=asker.addresses)
        stream.write(bytes(1 << 16))
        assert await stream.read_exactly(1 << 16) == bytes(1 << 16)
        stream = await asker.open_stream(asked.peer_id, ECHO, addresses=where)
        stream.write(bytes(1 << 16))
        assert await stream.read_exactly(1 << 16) == bytes(1 << 16)
    finally:
        await asyncio.gather(asker.close(), asked.close())


async def test_giving_up_on_a_start_leaves_nothing() -> None:
    for pause_s in (0.0, 0.02, 0.1, 0.2):
        creating = asyncio.create_task(start())
        await asyncio.sleep(pause_s)
        creating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await creating).close()
    assert not left_behind()


async def test_giving_up_at_the_last_step_of_a_start_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reached = asyncio.Event()

    async def hang(*_: object) -> None:
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(HivemindTransport, "serve", hang)
    creating = asyncio.create_task(start())
    await reached.wait()
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert not left_behind()


async def test_a_dead_daemon_is_a_network_error() -> None:
    async with swarm(2) as peers:
        os.kill(peers[0].daemon_pid, signal.SIGKILL)
        await eventually(lambda: not alive(peers[0].daemon_pid))
        await asyncio.sleep(0.1)
        with pytest.raises(NetworkError):
            await peers[0].open_stream(peers[1].peer_id, ECHO)
        with pytest.raises(NetworkError):
            await peers[0].get(KEY)


CHILD = """
import asyncio, json, sys
from dht.daemon.transport import HivemindTransport
from dht.transport.config import TransportConfig
from dht.identity.peer_id import Identity

async def main():
    identity = Identity.load_or_create(sys.argv[1])
    config = TransportConfig(identity=identity, host='127.0.0.1')
    peer = await HivemindTransport.create(config)
    print(json.dumps({"pid": peer.daemon_pid, "peer_id": peer.peer_id,
                      "directory": str(peer._control_path.parent),
                      "addresses": peer.addresses}), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_the_daemon_dies_with_a_killed_process(tmp_path: Path) -> None:
    peer_ids = set()
    for _ in range(2):  # a killed peer comes back with the same id
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path / "id")], stdout=subprocess.PIPE, cwd=ROOT
        ) as child:
            assert child.stdout is not None
            try:
                said = json.loads(child.stdout.readline())
                assert alive(said["pid"])
                assert said["addresses"][0].endswith(said["peer_id"])
                peer_ids.add(said["peer_id"])
            finally:
                child.send_signal(signal.SIGKILL)
        asyncio.run(eventually(lambda: not alive(said["pid"])))  # noqa: B023
        assert Path(said["directory"]).exists()
    assert len(peer_ids) == 1

    async def sweep() -> None:
        peer = await start()
        await peer.close()

    asyncio.run(sweep())
    assert not Path(said["directory"]).exists()
