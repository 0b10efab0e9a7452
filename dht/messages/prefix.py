"""Names of a prompt's blocks, under which stages keep KV for sessions to come. Pure.

A block is ``BLOCK_TOKENS`` consecutive token ids. Its name covers every token up to its end, so
equal names mean equal tokens, and with the same weights equal KV. Later stages see no token ids:
the client names its prompt's blocks in the open. The names are digests under a key that the client
alone knows, so no stage can try whether a prompt is one that it guesses; a prompt that is shared on
purpose has its names under a key that everybody knows. Blocks that reach into the answer are named
after their session, by its client and its stages alike.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b

BLOCK_TOKENS = 16
"""Fixed by the wire: tokens of a block that has a name."""
NAME_BYTES = 16
"""Fixed by the wire: length of a name."""
BLOCKS_MAX = 8192
"""Maximum blocks that an open names: 131,072 tokens in 128 KiB."""
SHARED_KEY = b"anabranch-shared-prefix-v1"
ROOT = bytes(NAME_BYTES)
"""Name in front of the first block's: each name is made from the one before it."""


def block_names(key: bytes, token_ids: Sequence[int], parent: bytes = ROOT) -> list[bytes]:
    """Names of the whole blocks of ``token_ids``, which follow the block named ``parent``.

    ``key`` has at most 64 bytes; a token id at most 32 bits.
    """
    names, packed, size = [], struct.pack(f"<{len(token_ids)}I", *token_ids), 4 * BLOCK_TOKENS
    for at in range(0, len(packed) - size + 1, size):
        parent = blake2b(parent + packed[at : at + size], key=key, digest_size=NAME_BYTES).digest()
        names.append(parent)
    return names


def answer_name(session: str, block: int) -> bytes:
    """Name of block ``block`` of a session, counted from the prompt's first, where it reaches
    beyond the blocks that the open names."""
    return blake2b(f"{session}/{block}".encode(), digest_size=NAME_BYTES).digest()


def block_name(blocks: bytes, block: int) -> bytes:
    """Name of block ``block`` among packed names; empty beyond their end."""
    return blocks[block * NAME_BYTES : (block + 1) * NAME_BYTES]
