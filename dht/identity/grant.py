"""Signatures within a session: a client's grant on its open, and a stage's word: that it leaves,
that it refuses, or that it lost a neighbour.

Each stage checks the client's grant before it reserves anything. A session's name tells whose it
is, so nobody else opens one under it, to keep the client out or to be told of its session.

An open travels over stages that the client does not control. The signature covers what the client
decides (route, lengths, sampling, history, a planned move's end and the KV's source) and
leaves out what stages fill in: the hop's index and whether the rows are logged. What is signed is
the canonical form (:func:`dht.messages.codec.canonical`), which is what the reader verifies.
"""

from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from typing import TypeVar

from dht.identity.peer_id import verify
from dht.messages import codec
from dht.messages.session import (
    RefusalCode,
    SessionFailed,
    SessionLeaving,
    SessionOpen,
    SessionRefused,
)

Word = TypeVar("Word", bound=SessionFailed | SessionLeaving | SessionRefused)
Signed = TypeVar("Signed")

GRANT_PREFIX = b"anabranch-grant-v1\0"
WORD_PREFIX = b"anabranch-word-v1\0"
GRANT_LIFE_S = 120.0
"""Lifetime of a grant: an open is answered within seconds, and clocks differ."""
NAMED = "~"
"""Fixed by the wire: begins a session's name that tells whose it is. Those of earlier software are
hex digits, and tell nothing."""
NONCE_DIGITS, NAME_CHARACTERS = 12, 32
"""Fixed by the wire: hex digits of a name that are drawn, and all of its characters. The 19 digits
of the client in between are too many to find another peer id for."""


def session_name(client: str, nonce: str) -> str:
    """The name of a new session of ``client``; ``nonce`` are ``NONCE_DIGITS`` new digits."""
    digest = blake2b(f"{nonce}/{client}".encode()).hexdigest()
    return f"{NAMED}{nonce}{digest}"[:NAME_CHARACTERS]


def _may_be_of(session: str, client: str) -> bool:
    """Whether a session's name can be one of ``client``."""
    nonce = session[len(NAMED) :][:NONCE_DIGITS]
    return not session.startswith(NAMED) or session == session_name(client, nonce)


def grant(open_: SessionOpen, sign: Callable[[bytes], bytes], now_unix_s: float) -> SessionOpen:
    """``open_``, canonical, with an expiry and its client's signature, made by ``sign``."""
    open_ = _canonical(replace(open_, expires_unix_s=now_unix_s + GRANT_LIFE_S))
    return replace(open_, grant=sign(_signed_bytes(open_)))


def grant_refusal(open_: SessionOpen, now_unix_s: float) -> tuple[RefusalCode, str] | None:
    """Why the grant of ``open_`` does not count at ``now_unix_s``, or None.

    A bad request is not what the client sent. Where clocks differ, the request may be right and
    this peer's clock wrong: others may take it.
    """
    if not _may_be_of(open_.session, open_.client):
        return RefusalCode.BAD_REQUEST, "this session's name is another client's"
    if not verify(open_.client, _signed_bytes(open_), open_.grant):
        return RefusalCode.BAD_REQUEST, "this open is not signed by its client"
    left_s = open_.expires_unix_s - now_unix_s
    if left_s < 0:
        reason = f"the client's grant expired {-left_s:.0f} s ago by this peer's clock"
        return RefusalCode.DRAINING, reason
    if left_s > 2 * GRANT_LIFE_S:
        reason = f"the client's grant lasts {left_s:.0f} s by this peer's clock, which is too long"
        return RefusalCode.DRAINING, reason
    return None


def own_word(word: Word, sign: Callable[[bytes], bytes]) -> Word:
    """``word``, canonical, with the signature of the stage that says it, made by ``sign``."""
    word = _canonical(word)
    return replace(word, signature=sign(_word_bytes(word)))


def is_own_word(word: SessionFailed | SessionLeaving | SessionRefused) -> bool:
    """Whether the stage that is said to say ``word`` does say it."""
    speaker = word.peer_id if isinstance(word, SessionLeaving) else word.by
    return verify(speaker, _word_bytes(word), word.signature)


def _canonical(message: Signed) -> Signed:
    """``message`` as its reader will have it; as it stands where no reader takes it."""
    try:
        return codec.canonical(message)
    except ValueError:
        return message


def _word_bytes(word: SessionFailed | SessionLeaving | SessionRefused) -> bytes:
    return WORD_PREFIX + codec.encode(replace(word, signature=b""))


def _signed_bytes(open_: SessionOpen) -> bytes:
    return GRANT_PREFIX + codec.encode(replace(open_, hop=0, rows_logged=True, grant=b""))
