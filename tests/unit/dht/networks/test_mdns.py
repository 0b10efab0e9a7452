"""Peers find each other by real multicast packets; a flood of these costs bounded room and time."""

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import pytest

from dht.errors import NetworkError
from dht.identity.peer_id import Identity
from dht.networks.local_network import LOCAL_NETWORK, SERVICE, Offer, offer_of_peer, txt_of
from dht.networks.mdns import advertise, look

GROUP, PORT = "224.0.0.251", 5353
LOOKS_MAX = 20


def _hears_itself() -> bool:
    """Whether this machine gets its own multicast packets."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mouth,
    ):
        try:
            ear.bind(("", 0))
            joined = socket.inet_aton("224.0.0.252") + bytes(4)
            ear.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, joined)
            ear.settimeout(5.0)
            mouth.sendto(b"?", ("224.0.0.252", ear.getsockname()[1]))
            return ear.recv(1) == b"?"
        except OSError:
            return False


@pytest.fixture(autouse=True, scope="module")
def multicast() -> None:
    if not _hears_itself():
        pytest.skip("this machine does not get its own multicast packets")


def made_up(number: int) -> str:
    """A peer id that no other process here makes up."""
    return Identity((os.getpid() << 32 | number).to_bytes(32)).peer_id


def offer(number: int) -> Offer:
    peer_id = made_up(number)
    told = [f"/ip4/192.168.1.7/tcp/31330/p2p/{peer_id}", f"/ip6/fd00::7/tcp/31330/p2p/{peer_id}"]
    return offer_of_peer(f"pc-{number}", "made-up", told, "brook", "ab" * 32)


@asynccontextmanager
async def offered(*offers: Offer) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(advertise(each)) for each in offers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def seen(enough: Callable[[set[Offer]], bool]) -> set[Offer]:
    """What is offered here by peers of this test, once it is enough."""
    ours = {offer(1), offer(2)}
    for _ in range(LOOKS_MAX):
        found = ours & set(await asyncio.to_thread(look, 0.5, 0.5))
        if enough(found):
            return found
    raise AssertionError(f"{LOOKS_MAX} looks show {found}")


async def test_peers_are_found_as_long_as_they_offer_and_nobody_takes_their_place() -> None:
    async with offered(offer(1), offer(2)):
        await seen(lambda found: found == {offer(1), offer(2)})
        with pytest.raises(NetworkError, match="says that he is this peer"):
            await advertise(offer(1))
    await seen(lambda found: not found)


@pytest.fixture
def flood() -> Iterator[set[str]]:
    """A thousand made-up services, told again and again: of names that are none, of peers that do
    not exist, and a record of 8 KB. Gives the peer ids in it."""
    from zeroconf import DNSOutgoing, DNSPointer, DNSText
    from zeroconf.const import _CLASS_IN, _FLAGS_AA, _FLAGS_QR_RESPONSE, _TYPE_PTR, _TYPE_TXT

    packets: list[bytes] = []
    text = b"".join(
        bytes([len(entry)]) + entry
        for key, value in txt_of(offer(1)).items()
        for entry in [f"{key}={value}".encode()]
    )
    peer_ids = {made_up(1000 + number) for number in range(500)}
    instances = [*map(str, range(500)), *sorted(peer_ids)]
    for number, instance in enumerate(instances):
        name = f"{instance}.{SERVICE}"
        out = DNSOutgoing(_FLAGS_QR_RESPONSE | _FLAGS_AA)
        out.add_answer_at_time(DNSPointer(SERVICE, _TYPE_PTR, _CLASS_IN, 4500, name), 0)
        told = text if number < 999 else b"\xffi0=" + b"x" * 8000
        out.add_answer_at_time(DNSText(name, _TYPE_TXT, _CLASS_IN, 4500, told), 0)
        packets += out.packets()
    ends = threading.Event()

    def send() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mouth:
            mouth.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 0)  # stays on this machine
            while not ends.is_set():
                for packet in packets:
                    mouth.sendto(packet, (GROUP, PORT))

    sender = threading.Thread(target=send)
    sender.start()
    yield {*peer_ids, made_up(1)}
    ends.set()
    sender.join()


def test_a_thousand_made_up_services_cost_bounded_room_and_time(
    flood: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from zeroconf.asyncio import AsyncServiceInfo

    asked = []
    request = AsyncServiceInfo.async_request

    async def counted(info: AsyncServiceInfo, *given: float) -> bool:
        asked.append(info.name)
        return bool(await request(info, *given))

    monkeypatch.setattr(AsyncServiceInfo, "async_request", counted)
    for _ in range(LOOKS_MAX):
        asked.clear()
        found = {each.peer_id for each in look(0.5, 0.5)}
        assert not found & flood  # what is told is another peer's
        assert len(asked) <= LOCAL_NETWORK.heard_max
        if len(asked) == LOCAL_NETWORK.heard_max:
            return
    raise AssertionError("the flood was not heard")
