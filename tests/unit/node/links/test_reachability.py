"""Being dialled back: what is dialled for whom, and what follows from it."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from dht.errors import NetworkError, UserError
from dht.identity.peer_id import Identity
from dht.messages import codec
from dht.messages.peer import ReachAnswer, ReachRequest
from dht.messages.session import Ping
from dht.transport.listener import GREETING
from dht.transport.streams import stream_pair
from node.links.dial_back_findings import is_public
from node.links.reachability import ReachConfig, ReachServer, greeter, port_of
from node.peer.dry_run import reach_sentence
from testing.network import MemoryNetwork
from tests.unit.dht.transport.test_listener import certified
from tests.unit.dht.transport.test_listener import peer as another_peer

LOCAL = "127.0.0.1"
LIMITS = ReachConfig(dial_s=0.5)
ALICE = Identity(b"a" * 32).peer_id
PUBLIC = "8.8.4.4"
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def greeting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(GREETING)
    await writer.drain()


async def something_else(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.6 and more\r\n")
    await writer.drain()


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


@contextlib.asynccontextmanager
async def listening(talk: Talk) -> AsyncIterator[int]:
    """A port where ``talk`` answers."""

    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await talk(reader, writer)
        writer.close()

    server = await asyncio.start_server(closing, LOCAL, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def asked(
    server: ReachServer, message: object, host: str = LOCAL, peer: str = ALICE
) -> ReachAnswer:
    """What ``server`` says to ``peer``, which it sees come from ``host``."""
    near, far = stream_pair(peer, "server")
    far.remote_host = host
    await codec.send_frame(near, message)
    await server._serve(far)
    answer = (await codec.read_frame(near)).message
    assert isinstance(answer, ReachAnswer)
    return answer


def server() -> ReachServer:
    return ReachServer(MemoryNetwork(random.Random(1)).transport(), LIMITS)


async def test_only_libp2p_where_the_asker_comes_from_counts() -> None:
    async with listening(greeting) as port:
        answer = await asked(server(), ReachRequest(port=port))
        assert answer == ReachAnswer(reached=True, host=LOCAL)
    assert not (await asked(server(), ReachRequest(port=port))).reached, "closed by now"
    for talk in (something_else, silence):
        async with listening(talk) as port:
            answer = await asked(server(), ReachRequest(port=port))
            assert answer == ReachAnswer(reached=False, host=LOCAL)


async def test_another_peer_at_the_same_port_is_not_the_one_that_asks(tmp_path: Path) -> None:
    _, file = certified(Identity(b"b" * 32), Identity(b"b" * 32), tmp_path)
    async with another_peer(file) as port:
        answer = await asked(server(), ReachRequest(port=port))
        assert answer == ReachAnswer(reached=False, host=LOCAL)
        bob = Identity(b"b" * 32).peer_id
        answer = await asked(server(), ReachRequest(port=port), peer=bob)
        assert answer == ReachAnswer(reached=True, host=LOCAL)


async def test_who_comes_through_a_relay_is_not_dialled() -> None:
    answer = await asked(server(), ReachRequest(port=1), host="")
    assert answer == ReachAnswer(reached=None)


async def test_dials_are_few_for_a_peer_an_address_and_in_all() -> None:
    async with listening(greeting) as port:
        request = ReachRequest(port=port)
        one = server()
        assert [(await asked(one, request)).reached for _ in range(4)] == [*[True] * 3, None]
        # Another identity at the same address is no way around it.
        bob = Identity(b"b" * 32).peer_id
        assert (await asked(one, request, peer=bob)).reached is None
        many = server()
        found = [
            (await asked(many, request, host=LOCAL, peer=str(number))).reached
            for number in range(8)
        ]
        assert found == [*[True] * 3, *[None] * 5]


async def test_other_messages_are_refused() -> None:
    with pytest.raises(codec.MalformedError, match="no dial back"):
        await asked(server(), Ping(nonce=1))
    near, far = stream_pair(ALICE, "server")
    await near.close()
    with pytest.raises(NetworkError):
        await server()._serve(far)


@pytest.mark.parametrize("port", [0, -1, 65_536])
def test_a_port_that_is_none_is_no_message(port: int) -> None:
    with pytest.raises(codec.MalformedError):
        codec.decode(codec.encode(ReachRequest(port=port)))


def test_the_port_is_that_of_a_direct_address() -> None:
    assert port_of(()) is None
    assert port_of(("/ip4/1.2.3.4/tcp/1/p2p/relay/p2p-circuit/p2p/me",)) is None
    assert port_of(("/ip6/::1/tcp/5/p2p/me",)) == 5
    assert is_public(PUBLIC)
    assert not any(map(is_public, ("", "10.1.1.1", "127.0.0.1", "fe80::1", "example.org")))


async def test_the_rehearsal_listens_as_libp2p_would() -> None:
    async with greeter(LOCAL, 0) as port:
        answer = await asked(server(), ReachRequest(port=port))
        assert answer == ReachAnswer(reached=True, host=LOCAL)
        with pytest.raises(UserError, match=f"port {port}"):
            async with greeter(LOCAL, port):
                pass


def test_the_rehearsal_says_what_to_do_in_one_line() -> None:
    assert "2 of 3 peers that dialled port 7" in reach_sentence(2, 3, 7, may_relay=False)
    closed = reach_sentence(0, 1, 7, may_relay=True)
    assert "0 of 1 peer that dialled port 7 got through. Forward" in closed
    assert "through a relay" in closed
    assert "gets no layers" in reach_sentence(0, 1, 7, may_relay=False)
    assert "try again" in reach_sentence(0, 0, 7, may_relay=True)
