"""Keys that a gateway asks for: their names, what each may use, and what it has used. Pure.

What was used is kept while the process runs.
"""

import hmac
import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from client.gateway.errors import ApiError, bad_request, too_many
from dht.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysConfig:
    keys_max: int = 1024
    file_bytes_max: int = 1 << 20


KEYS = KeysConfig()


MINUTE_S, DAY_S = 60, 86_400
"""Fixed by the clock."""

KeyName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")]
KeyLimit = Annotated[int, Meta(ge=1, le=1 << 53)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key, known by its SHA-256, and its quota; None: any number."""

    name: str
    digest: bytes
    salt: str
    """Requests of keys with the same salt find each other's prompts in the prefix cache."""
    tokens_per_day: int | None = None
    """Tokens of prompts and answers in a day of UTC."""
    requests_per_minute: int | None = None
    sessions: int | None = None
    """Answers that are made or wait at a time."""


class _Entry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    key: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")] | None = None
    salt: KeyName | None = None
    tokens_per_day: KeyLimit | None = None
    requests_per_minute: KeyLimit | None = None
    sessions: KeyLimit | None = None


class _File(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    keys: Annotated[dict[KeyName, Any], Meta(min_length=1, max_length=KEYS.keys_max)]


def key_digest(key: str) -> bytes:
    """SHA-256 of a key."""
    return sha256(key.strip().encode("utf-8", "surrogateescape")).digest()


def plain_keys(texts: Iterable[str]) -> tuple[Key, ...]:
    """Keys without quotas, named by their numbers; what is empty or said twice is left out."""
    digests = dict.fromkeys(key_digest(text) for text in texts if text.strip())
    return tuple(
        Key(name=str(number), digest=digest, salt=digest.hex())
        for number, digest in enumerate(digests, 1)
    )


def named_keys(text: str) -> tuple[Key, ...]:
    """The keys in the text of a TOML file; raises UserError, without a word of a key."""
    try:
        found = msgspec.convert(tomllib.loads(text), _File)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"this is not TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise UserError(str(error)) from None
    keys = []
    for name, said in found.keys.items():
        try:
            entry = msgspec.convert(said, _Entry)
        except msgspec.ValidationError as error:
            raise UserError(f"keys.{name}: {error}") from None
        if (entry.key is None) == (entry.sha256 is None):
            raise UserError(f"keys.{name} has to have one of key and sha256")
        digest = key_digest(entry.key) if entry.key else bytes.fromhex(entry.sha256 or "")
        keys.append(
            Key(
                name=name,
                digest=digest,
                # Nobody's salt can be the one that another key has by itself.
                salt=digest.hex() if entry.salt is None else f"={entry.salt}",
                tokens_per_day=entry.tokens_per_day,
                requests_per_minute=entry.requests_per_minute,
                sessions=entry.sessions,
            )
        )
    return tuple(keys)


def check_distinct(keys: Sequence[Key]) -> None:
    """Raises UserError where two keys have one name, or two names one key."""
    names: dict[bytes, str] = {}
    for key in keys:
        if key.name in names.values():
            raise UserError(f"two keys are called {key.name}")
        if key.digest in names:
            raise UserError(f"{names[key.digest]} and {key.name} are the same key")
        names[key.digest] = key.name


class SpanLimit:
    """Bounds what is taken in each span of Unix time."""

    def __init__(self, limit: int | None, span_s: int) -> None:
        self.limit = limit
        self._span_s = span_s
        self._at = -1.0
        self._taken = 0

    def take(self, amount: int, now_s: float) -> int:
        """Take ``amount`` and return 0; or take nothing where less is left, and return the seconds
        until the next span. A clock that goes back into the span before gives none twice."""
        at, into_s = divmod(now_s, self._span_s)
        if not self._at - 1 <= at <= self._at:
            self._at, self._taken = at, 0
        if self.limit is not None and self._taken + amount > self.limit:
            return math.ceil(self._span_s - into_s)
        self._taken += amount
        return 0

    def left(self, now_s: float) -> int | None:
        """What can be taken now; None: any amount."""
        if self.limit is None:
            return None
        at = now_s // self._span_s
        return self.limit - (self._taken if self._at - 1 <= at <= self._at else 0)

    def give_back(self, amount: int, taken_s: float) -> None:
        """Return what was taken at ``taken_s``, if that is the same span; never more than all."""
        if taken_s // self._span_s == self._at:
            self._taken = max(0, self._taken - amount)


class Account:
    """What a key has used."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self._requests = SpanLimit(key.requests_per_minute, MINUTE_S)
        self._tokens = SpanLimit(key.tokens_per_day, DAY_S)
        self._sessions = 0
        self._held = 0
        """Tokens that running answers hold, and may give back."""

    def begin(self, now_s: float) -> None:
        """Count a request; raises ApiError (429)."""
        if wait_s := self._requests.take(1, now_s):
            limit = self._requests.limit
            raise too_many(f"this key has its {limit} requests of this minute", wait_s)

    def tokens_left(self, now_s: float) -> int | None:
        """Tokens that this key has left of its day; None: any number."""
        return self._tokens.left(now_s)

    @contextmanager
    def spending(
        self, most: int, sessions: int, spent: Callable[[], int], now_s: float
    ) -> Iterator[None]:
        """Hold ``most`` tokens and ``sessions`` within the block, and give back all but the tokens
        that ``spent()`` says then; raises ApiError (429, or 400 for what never fits)."""
        limit, at_once = self._tokens.limit, self.key.sessions
        if limit is not None and most > limit:
            raise bad_request(
                f"prompt and answer may have {most} tokens; this key has {limit} a day"
            )
        if at_once is not None and sessions > at_once:
            raise bad_request(f"this asks for {sessions} answers at once; this key has {at_once}")
        if at_once is not None and self._sessions + sessions > at_once:
            raise too_many(f"{self._sessions} of this key's {at_once} answers are made")
        if wait_s := self._tokens.take(most, now_s):
            reason = f"this may take {most} tokens of prompt and answer; this key has not so many"
            reason += f" left of its {limit} for this day"
            if most <= (self._tokens.left(now_s) or 0) + self._held:
                raise too_many(f"{reason} while other answers are made")
            raise too_many(reason, wait_s)
        self._sessions += sessions
        self._held += most
        try:
            yield
        finally:
            self._sessions -= sessions
            self._held -= most
            self._tokens.give_back(most - spent(), now_s)


NOBODY = Key(name="-", digest=b"", salt="")
"""The key that all requests count for where the gateway asks for none."""


class Keys:
    """The keys of a gateway; false where there are none, and anybody may ask."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._accounts = [Account(key) for key in keys]
        self.nobody = Account(NOBODY)

    def __bool__(self) -> bool:
        return bool(self._accounts)

    def find(self, *texts: str) -> Account:
        """Whose key one of these is; raises ApiError (401). Programs send what they have for
        another service beside it, or nothing.

        Every key is compared, and by digest: the time says nothing about them.
        """
        found = None
        for given in [key_digest(text) for text in texts if text.strip()]:
            for account in self._accounts:
                if hmac.compare_digest(given, account.key.digest):
                    found = account
        if found is None:
            raise ApiError(
                401,
                "give a valid key as 'Authorization: Bearer KEY'",
                type="authentication_error",
                code="invalid_api_key",
            )
        return found
