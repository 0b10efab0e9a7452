"""The DHT's one value that is more than a record: all records under a key, as hivemind packs them.

It is msgpack's ext type 0x50 around ``[size limit, latest expiry, [[author, record, expiry], …]]``.
hivemind's own reader also takes ext types within each other without end, keys of any type, and any
number of them, so nothing that comes from another peer is read by it. Pure.
"""

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from dht.messages.codec import MalformedError
from dht.messages.types import RECORD_BOUNDS

T = TypeVar("T")

DICTIONARY_EXT = 0x50
"""Fixed by hivemind: its extension type of MessagePack for dictionaries."""
DICTIONARY_BYTES_MAX = 3 << 20
"""Maximum bytes of one: hivemind's daemon takes messages of 4 MiB, and does not deliver longer
ones."""

Entry = tuple[str, bytes, float]
"""Author's peer id, packed record, and the expiry stated beside it; none of them checked."""
_ext = msgspec.msgpack.Decoder(msgspec.msgpack.Ext)
_dictionary = msgspec.msgpack.Decoder(
    tuple[float | None, float, Annotated[list[Entry], Meta(max_length=RECORD_BOUNDS.peers_max)]]
)
_author = msgspec.msgpack.Decoder(str)
_record = msgspec.msgpack.Decoder(bytes)


def entries_of(data: bytes) -> list[Entry]:
    """The entries of a packed dictionary, ``RECORD_BOUNDS.peers_max`` at most; raises
    MalformedError."""
    if len(data) > DICTIONARY_BYTES_MAX:
        raise MalformedError(
            f"records of {len(data)} bytes; the limit under a key is {DICTIONARY_BYTES_MAX}"
        )
    try:
        packed = _ext.decode(data)
        if packed.code != DICTIONARY_EXT:
            raise MalformedError(f"ext type {packed.code} holds no records")
        return _dictionary.decode(packed.data)[2]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError(f"no records: {error}") from error


def author_of(data: bytes) -> str:
    """The author in a packed subkey; raises MalformedError for any other subkey."""
    return _plain(_author, data)


def record_in(data: bytes) -> bytes:
    """The record in a packed value; raises MalformedError for any other value."""
    return _plain(_record, data)


def _plain(decoder: "msgspec.msgpack.Decoder[T]", data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError(f"no plain value: {error}") from error
