"""Offers to and from peers on the same local network, by multicast DNS; the shell around zeroconf.

Nothing here runs unless a user asks for it with ``--local``, or joins and knows no network yet.
zeroconf bounds what it keeps of other
machines' packets (10,000 records, 9 KB a packet); what is taken from it is bounded and checked by
:mod:`dht.networks.local_network`.
"""

import asyncio
import ipaddress
import logging
import socket
import threading
from contextlib import closing
from typing import TYPE_CHECKING

from dht.errors import NetworkError
from dht.identity.multiaddr import host_of
from dht.networks.local_network import SERVICE, Instances, Offer, read_offer, txt_of

if TYPE_CHECKING:
    from zeroconf import IPVersion, ServiceInfo

LISTEN_S, ASK_S = 2.0, 1.0
"""Time for instances to answer, then for those that have not said all."""
_log = logging.getLogger(__name__)
logging.getLogger("zeroconf").setLevel(logging.ERROR)  # it warns of whatever strangers send


def look(listen_s: float = LISTEN_S, ask_s: float = ASK_S) -> tuple[Offer, ...]:
    """What is offered on this machine's networks now, in the order in which it was heard.

    Takes ``listen_s`` and at most ``ask_s``, in a loop of its own. Raises NetworkError where no
    network can be looked at.
    """
    try:
        return asyncio.run(_look(listen_s, ask_s))
    except OSError as error:
        raise NetworkError(f"this machine's network cannot be looked at: {error}") from None


async def _look(listen_s: float, ask_s: float) -> tuple[Offer, ...]:
    from zeroconf import ServiceStateChange, Zeroconf
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

    heard = Instances()

    def on_change(
        zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        (heard.remove if state_change is ServiceStateChange.Removed else heard.add)(name)

    async with AsyncZeroconf(ip_version=_version()) as opened:
        async with AsyncServiceBrowser(opened.zeroconf, SERVICE, handlers=[on_change]):
            await asyncio.sleep(listen_s)
        told = [AsyncServiceInfo(SERVICE, name) for name in heard.names]
        asking = (each.async_request(opened.zeroconf, ask_s * 1000) for each in told)
        await asyncio.gather(*asking)
    offers = []
    for info in told:
        try:
            offers.append(read_offer(info.name, len(info.text or b""), info.properties))
        except ValueError as error:
            _log.debug("%s offers nothing: %s", info.name, error)
    return tuple(offers)


async def advertise(offer: Offer) -> None:
    """Tell this machine's networks of ``offer`` until cancelled, then take it back.

    In a thread with a loop of its own, so that a flood of packets waits beside this peer's work.
    Raises NetworkError.
    """
    leaves = threading.Event()
    work = asyncio.ensure_future(asyncio.to_thread(_answer, offer, leaves))
    try:
        await asyncio.shield(work)
    finally:
        leaves.set()
        await work


def _answer(offer: Offer, leaves: threading.Event) -> None:
    from zeroconf import Error, NonUniqueNameException, Zeroconf

    try:
        with closing(Zeroconf(ip_version=_version())) as zeroconf:
            zeroconf.register_service(_service(offer))
            leaves.wait()
    except (OSError, Error) as error:
        twice = isinstance(error, NonUniqueNameException)
        why = "somebody there says that he is this peer" if twice else repr(error)
        raise NetworkError(f"this peer is not offered on this network: {why}") from None


def _service(offer: Offer) -> "ServiceInfo":
    from zeroconf import ServiceInfo

    addresses = offer.invitation.addresses
    return ServiceInfo(
        SERVICE,
        f"{offer.peer_id}.{SERVICE}",
        port=int(addresses[0].split("/")[4]),
        properties=txt_of(offer),
        server=f"{offer.peer_id}.local.",
        addresses=[ipaddress.ip_address(host_of(each)).packed for each in addresses],
    )


def _version() -> "IPVersion":
    from zeroconf import IPVersion

    try:
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).close()
    except OSError:  # this system has no IPv6
        return IPVersion.V4Only
    return IPVersion.All
