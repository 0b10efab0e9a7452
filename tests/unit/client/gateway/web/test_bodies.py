"""Compressed bodies: read within the bound, or refused in words."""

import gzip
import zlib

import pytest

from client.gateway.errors import ApiError
from client.gateway.web.bodies import encoding_of, unpacked

TEXT = b'{"prompt": "Hi"}' * 40
BARE = zlib.compress(TEXT)[2:-4]
"""What some clients call deflate: no header, no sum."""


@pytest.mark.parametrize(
    ("body", "header"),
    [
        (TEXT, ""),
        (TEXT, "Identity"),
        (gzip.compress(TEXT, mtime=0), "gzip"),
        (gzip.compress(TEXT, mtime=0), "X-GZIP "),
        (zlib.compress(TEXT), "deflate"),
        (BARE, "deflate"),
    ],
)
def test_bodies_are_unpacked(body: bytes, header: str) -> None:
    assert unpacked(body, encoding_of(header), len(TEXT)) == TEXT


@pytest.mark.parametrize("header", ["br", "zstd", "gzip, br", "none"])
def test_other_encodings_are_named(header: str) -> None:
    with pytest.raises(ApiError, match=f"'Content-Encoding: {header}'") as refused:
        encoding_of(header)
    assert refused.value.status == 415


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"none", 400),
        (b"", 400),
        (gzip.compress(TEXT, mtime=0)[:-9], 400),
        (gzip.compress(TEXT, mtime=0) + b"more", 400),
        (gzip.compress(TEXT + b"x", mtime=0), 413),
        (gzip.compress(bytes(1 << 24), mtime=0), 413),
    ],
)
def test_what_is_broken_or_too_large_is_refused(body: bytes, status: int) -> None:
    with pytest.raises(ApiError) as refused:
        unpacked(body, "gzip", len(TEXT))
    assert refused.value.status == status
