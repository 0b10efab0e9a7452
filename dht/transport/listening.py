"""Whether a peer may listen at an address, and whether anybody does."""

import asyncio
import socket
import sys

from dht.errors import UserError, reason_of


def check_free(address: str) -> None:
    """Raise UserError when another program listens at ``address``, or it is no address.

    Both transports set SO_REUSEPORT, so two peers of one user would silently share a port, and each
    would get some of the connections that are meant for the other.
    """
    parts = address.strip("/").split("/")
    if len(parts) < 4 or parts[0] not in {"ip4", "ip6"} or parts[2] != "tcp":
        raise UserError(f"cannot listen on {address}: give /ip4/ADDRESS/tcp/PORT")
    if not parts[3].isascii() or not parts[3].isdigit() or int(parts[3]) > 65535:
        raise UserError(f"cannot listen on port {parts[3]}: give one from 1 to 65535, 0 for any")
    if (error := listen_error(parts[1], int(parts[3]))) is not None:
        raise UserError(
            f"cannot listen on {parts[1]} port {parts[3]}: {reason_of(error)}; give another port"
        ) from error


def listen_error(host: str, port: int) -> OSError | None:
    """Why this machine cannot listen at an IP address of its own and a TCP port; None: it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        if sys.platform != "win32":  # there it would take a port that is in use
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
            trial.listen(1)
        except OSError as error:
            return error
    return None


async def listens(host: str, port: int, limit_s: float) -> bool:
    """Whether something takes a TCP connection there within ``limit_s``."""
    try:
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
