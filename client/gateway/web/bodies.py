"""Bodies of requests: how much of them is held, and what is in compressed ones. Pure."""

import zlib
from dataclasses import dataclass

from client.gateway.errors import ApiError, bad_request, too_many
from dht.budget import Amount, Held

BODY_BYTES = Amount(
    name="body_bytes",
    unit="MiB",
    per_peer=32 << 20,
    in_all=128 << 20,
    crowded=96 << 20,
    when_crowded=1 << 20,
)
"""Bytes of bodies from their beginning until they are understood, by address: read, they may take
twenty times as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodiesConfig:
    """What of a body is counted."""

    uncounted_bytes: int = 64 << 10
    """The beginning of each, which is not: most have no more."""


BODIES = BodiesConfig()

PLAIN = frozenset({"", "identity"})
PACKED = frozenset({"gzip", "x-gzip", "deflate"})
"""Encodings that every installation reads; others need packages that it may lack."""
EITHER_HEADER, NO_HEADER = 32 + zlib.MAX_WBITS, -zlib.MAX_WBITS
"""Fixed by zlib: gzip's header or zlib's own, and none, as some clients send ``deflate``."""


def encoding_of(header: str) -> str:
    """The encoding that ``Content-Encoding`` names; raises ApiError (415) for one that is not read
    here."""
    encoding = header.strip().lower()
    if encoding in PLAIN | PACKED:
        return encoding
    said = f"'Content-Encoding: {header[:80]}'"
    raise ApiError(415, f"a body with {said} is not read here: send it plain, or as gzip")


def unpacked(body: bytes, encoding: str, bytes_max: int) -> bytes:
    """What ``body`` holds, at most ``bytes_max`` bytes; raises ApiError (400, 413)."""
    if encoding in PLAIN:
        return body
    is_bare = encoding == "deflate" and body[:1] and body[0] & 0xF != zlib.DEFLATED
    reader = zlib.decompressobj(NO_HEADER if is_bare else EITHER_HEADER)
    try:
        found = reader.decompress(body, bytes_max + 1)
    except zlib.error:
        raise bad_request(f"the body cannot be read: it is no {encoding}") from None
    if len(found) > bytes_max:
        raise too_large()
    if not reader.eof or reader.unused_data:
        raise bad_request(f"the body cannot be read: its {encoding} is not whole")
    return found


def too_large() -> ApiError:
    """The answer to a body beyond the bound."""
    return ApiError(413, "the body is larger than this gateway takes", code="too_large")


@dataclass(slots=True, kw_only=True)
class Body:
    """What has come of a request, counted until it is forgotten."""

    held: Held
    address: str
    data: bytes | bytearray = b""
    _counted: int = 0

    def hold(self, data: bytes | bytearray) -> None:
        """Hold ``data`` in the place of what was held; raises ApiError (429) without room."""
        counted = max(0, len(data) - BODIES.uncounted_bytes)
        if counted > self._counted:
            if not self.held.take(self.address, counted - self._counted):
                raise too_many("too many bytes of unfinished requests are held here")
        else:
            self.held.give_back(self.address, self._counted - counted)
        self.data, self._counted = data, counted

    def close(self) -> None:
        """Hold nothing any more."""
        self.hold(b"")
