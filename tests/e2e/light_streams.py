"""The light side of test_light_transport: run as a process of its own, against a full peer.

python -m tests.e2e.light_streams CASE ADDRESS
"""

import asyncio
import hashlib
import random
import sys
from collections.abc import Awaitable, Callable

from dht.errors import NetworkError, UserError
from dht.identity.peer_id import Identity
from dht.light.transport import LightTransport
from dht.transport.config import TransportConfig
from dht.transport.interface import Stream
from dht.transport.listener import greets, identity_of

ECHO, SINK, SLOW_SINK, SOURCE = (f"/test/{n}/1" for n in ("echo", "sink", "slow", "source"))
ARRIVED, CALL_ME, CALL = (f"/test/{n}/1" for n in ("arrived", "call-me", "call"))
LAST, HEAR_ME = (f"/test/{n}/1" for n in ("last", "hear-me"))
DRAWN = random.Random(1)
BIG_BYTES = 24 << 20
SLOW_S = 7.0
"""py-libp2p gives a stream up whose reader rests for 5 s; ours must not."""
WORD, NOISE = bytes(range(256)) * 800, bytes(200_000)


async def last_word(stream: Stream) -> None:
    """Say a word and go, though the other side has said more than anybody has read."""
    await stream.read_exactly(1)
    stream.write(WORD)


async def hear(open_: Callable[[], Awaitable[Stream]]) -> None:
    """Every last word arrives whole, read piece by piece."""

    async def one() -> None:
        stream = await open_()
        stream.write(NOISE)
        for at in range(0, len(WORD), 1024):
            assert await stream.read_exactly(1024) == WORD[at : at + 1024]
        await stream.close()

    for _ in range(25):
        await asyncio.gather(*(one() for _ in range(8)))


async def echo_of_every_size(light: LightTransport, peer: str, where: tuple[str, ...]) -> None:
    stream = await light.open_stream(peer, ECHO, addresses=where)
    assert stream.remote_peer_id == peer
    for size in (1, 2, 100, 4 << 10, (64 << 10) - 1, (64 << 10) + 1, 1 << 20, 5 << 20):
        data = DRAWN.randbytes(size)
        stream.write(size.to_bytes(4, "little") + data)
        await stream.drain()
        assert await stream.read_exactly(size) == data
    await stream.close()
    await stream.close()


async def many_streams_at_once(light: LightTransport, peer: str, where: tuple[str, ...]) -> None:
    async def one(number: int) -> None:
        stream = await light.open_stream(peer, ECHO, addresses=where)
        for round_ in range(5):
            data = bytes([number]) * (1 + 1000 * round_ + number)
            stream.write(len(data).to_bytes(4, "little") + data)
            await stream.drain()
            assert await stream.read_exactly(len(data)) == data
        await stream.close()

    for _ in range(3):
        await asyncio.gather(*(one(number) for number in range(80)))


async def what_is_written_arrives_though_the_stream_is_closed_at_once(
    light: LightTransport, peer: str, where: tuple[str, ...]
) -> None:
    stream = await light.open_stream(peer, SINK, addresses=where)
    data = DRAWN.randbytes(BIG_BYTES)
    stream.write(BIG_BYTES.to_bytes(4, "little") + hashlib.sha256(data).digest() + data)
    await stream.close()
    # The other side tells what it got over another stream.
    for _ in range(600):
        told = await light.open_stream(peer, ARRIVED, addresses=where)
        counts = await told.read_exactly(1)
        await told.close()
        if counts == b"\1":
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it never arrived whole")


async def a_reader_that_rests_holds_the_writer_and_loses_nothing(
    light: LightTransport, peer: str, where: tuple[str, ...]
) -> None:
    # The full peer rests: this side waits for longer than py-libp2p would.
    stream = await light.open_stream(peer, SLOW_SINK, addresses=where)
    data = DRAWN.randbytes(BIG_BYTES)
    stream.write(BIG_BYTES.to_bytes(4, "little") + hashlib.sha256(data).digest())
    for at in range(0, BIG_BYTES, 1 << 20):
        stream.write(data[at : at + (1 << 20)])
        await stream.drain()
    assert await stream.read_exactly(4) == b"same"
    await stream.close()
    # This side rests: nothing may pile up without a bound.
    stream = await light.open_stream(peer, SOURCE, addresses=where)
    await asyncio.sleep(SLOW_S)
    held = stream._unread_bytes  # type: ignore[attr-defined]
    assert held <= 2 << 20, f"{held} bytes are held for a reader that rests"
    digest = await stream.read_exactly(32)
    assert hashlib.sha256(await stream.read_exactly(BIG_BYTES)).digest() == digest
    stream.write(b"\1")
    try:
        await stream.read_exactly(1)
    except NetworkError:
        pass
    else:
        raise AssertionError("the end was not seen")
    await stream.close()


async def the_last_word_of_who_goes_is_heard(
    light: LightTransport, peer: str, where: tuple[str, ...]
) -> None:
    await hear(lambda: light.open_stream(peer, LAST, addresses=where))
    await light.serve(LAST, last_word)
    await ask_back(light, peer, where, HEAR_ME)
    config = TransportConfig(identity=Identity.generate(), client_mode=True, initial_peers=where)
    other = await LightTransport.create(config)
    try:
        own = light.addresses
        await hear(lambda: other.open_stream(light.peer_id, LAST, addresses=own))
    finally:
        await other.close()


async def ask_back(light: LightTransport, peer: str, where: tuple[str, ...], protocol: str) -> None:
    """Tell the full peer where this one is, and wait until it is content."""
    told = await light.open_stream(peer, protocol, addresses=where)
    own = light.addresses[0].encode()
    told.write(len(own).to_bytes(4, "little") + own)
    await told.drain()
    assert await told.read_exactly(4) == b"done"
    await told.close()


async def being_called(light: LightTransport, peer: str, where: tuple[str, ...]) -> None:
    async def echo(stream: Stream) -> None:
        while True:
            size = int.from_bytes(await stream.read_exactly(4), "little")
            stream.write(await stream.read_exactly(size))
            await stream.drain()

    await light.serve(CALL, echo)
    await ask_back(light, peer, where, CALL_ME)
    assert light.stream_errors.keys() <= {"NetworkError"}


async def mistakes_are_network_errors(
    light: LightTransport, peer: str, where: tuple[str, ...]
) -> None:
    nobody = Identity.generate().peer_id
    cases = (
        (nobody, ECHO, ()),
        (nobody, ECHO, (f"/ip4/127.0.0.1/tcp/1/p2p/{nobody}",)),
        (nobody, ECHO, (where[0].rsplit("/", 1)[0] + f"/{nobody}",)),
        (peer, "/test/unknown/1", where),
        (light.peer_id, ECHO, ()),
    )
    for to, protocol, addresses in cases:
        try:
            await light.open_stream(to, protocol, addresses=addresses)
        except NetworkError:
            continue
        raise AssertionError(f"{to} {protocol} opened")
    # The connection to the full peer has survived all of it.
    await echo_of_every_size(light, peer, where)


async def a_port_that_another_listens_on_is_refused(
    light: LightTransport, peer: str, where: tuple[str, ...]
) -> None:
    """py-libp2p would share it, and each would get some of the other's connections."""
    port = int(light.addresses[0].split("/")[4])
    second = TransportConfig(
        identity=Identity.generate(), host="127.0.0.1", port=port, initial_peers=where
    )
    said = ""
    try:
        await LightTransport.create(second)
    except UserError as error:
        said = str(error)
    assert f"cannot listen on 127.0.0.1 port {port}" in said
    await echo_of_every_size(light, peer, where)


async def a_listener_tells_who_it_is(
    light: LightTransport, peer: str, where: tuple[str, ...]
) -> None:
    """As a full peer's certificate says; a light one offers noise alone, and shows none."""
    for address, expected in ((where[0], peer), (light.addresses[0], None)):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.split("/")[4]))
        assert await greets(reader, writer)
        assert await identity_of(reader, writer) == expected
        writer.close()


CASES: dict[str, Callable[[LightTransport, str, tuple[str, ...]], Awaitable[None]]] = {
    case.__name__: case
    for case in (
        echo_of_every_size,
        many_streams_at_once,
        what_is_written_arrives_though_the_stream_is_closed_at_once,
        a_reader_that_rests_holds_the_writer_and_loses_nothing,
        the_last_word_of_who_goes_is_heard,
        being_called,
        mistakes_are_network_errors,
        a_port_that_another_listens_on_is_refused,
        a_listener_tells_who_it_is,
    )
}


async def main(case: str, address: str) -> None:
    config = TransportConfig(
        identity=Identity.generate(), host="127.0.0.1", initial_peers=(address,)
    )
    light = await LightTransport.create(config)
    try:
        await CASES[case](light, address.rsplit("/", 1)[1], (address,))
    finally:
        await light.close()
        await light.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
