"""Whether a peer may listen at an address."""

import socket

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
    family = socket.AF_INET if parts[0] == "ip4" else socket.AF_INET6
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((parts[1], int(parts[3])))
            probe.listen(1)
        except OSError as error:
            raise UserError(
                f"cannot listen on {parts[1]} port {parts[3]}: {reason_of(error)};"
                " give another port"
            ) from error
