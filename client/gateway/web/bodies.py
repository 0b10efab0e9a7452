"""Bodies of requests that were sent compressed. Pure."""

import zlib

from client.gateway.errors import ApiError, bad_request

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
