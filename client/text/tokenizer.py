"""Text to token ids and back, with pieces that never split a character."""

import json
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from client.text.ends import added_tokens, all_special_tokens, stop_token_ids
from client.text.vocabulary import BYTE_OF, COMPOSED_CHARACTERS_MAX, longest_token
from dht.checkpoints.hub import TEXT_FILES, VOCABULARIES
from dht.checkpoints.library_files import read_by_library
from dht.errors import UserError
from dht.process.json_file import object_or_empty

TOKENS_KEPT = 1 << 16
"""Number of tokens whose texts are kept: log probabilities name the same ones again and again."""
UNFINISHED_TOKENS_MAX = 64
"""Maximum number of tokens that may be one unfinished character; a character has 4 bytes."""
CHARACTER_BYTES_MAX = 4
"""Fixed by UTF-8: the most tokens that are one character of bytes."""


class _WithoutPanics:
    """Calls ``library``, which is written in Rust, and makes its panics UserErrors.

    A panic is raised as an exception that ``except Exception`` does not catch, so a model's file
    that makes one would end whatever serves it.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        method: Any = getattr(self._library, name)
        if not callable(method):
            return method

        def call(*arguments: Any, **named: Any) -> Any:
            try:
                return method(*arguments, **named)
            except BaseException as error:
                if type(error).__name__ != "PanicException":
                    raise
                raise UserError(f"the model's tokenizer is broken: {str(error)[:200]}") from error

        return call


class Tokenizer:
    """The model's own tokenizer, read from its directory; no weights are touched."""

    def __init__(self, backend: Any) -> None:
        self._backend = _WithoutPanics(backend)
        self._piece = lru_cache(TOKENS_KEPT)(self._decode_piece)
        self._is_silent = lru_cache(TOKENS_KEPT)(lambda token_id: not self.decode([token_id] * 2))

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer | None":
        """The tokenizer in ``directory``; None where there is none (ids only).

        One without a ``tokenizer.json`` is converted by transformers from the files that it is made
        of; the model's own code is never run. Raises UserError for a file that cannot be read.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            made_of = [directory / name for name in VOCABULARIES if (directory / name).is_file()]
            return cls(_converted(made_of[0])) if made_of else None
        from tokenizers import Tokenizer as Backend

        said = object_or_empty(directory / "tokenizer_config.json")
        try:
            backend = _WithoutPanics(Backend).from_file(str(path))
            _add_tokens(_WithoutPanics(backend), directory)
            backend.encode_special_tokens = said.get("split_special_tokens") is True
        except Exception as error:
            raise UserError(f"cannot read {path}: {error}") from error
        return cls(backend)

    def showing(self, marks: Sequence[str]) -> "Tokenizer":
        """This tokenizer, with special tokens among ``marks`` shown as text."""
        model = json.loads(self._backend.to_str())
        for token in model.get("added_tokens", ()):
            token["special"] = token["special"] and token["content"] not in marks
        shown = self._backend.from_str(json.dumps(model))
        shown.encode_special_tokens = self._backend.encode_special_tokens
        return Tokenizer(shown)

    def mark_tokens(self, marks: Collection[str]) -> dict[str, int]:
        """Ids of the added tokens that ``marks`` are or have in them, by their text, which a
        grammar has to name: llguidance takes those for special that say so, and all that look like
        a tag, and matches neither with bytes."""
        added = json.loads(self._backend.to_str()).get("added_tokens", ())
        return {
            token["content"]: token["id"]
            for token in added
            if (token["special"] or _looks_like_a_tag(token["content"]))
            and any(token["content"] in mark for mark in marks)
        }

    def encode(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of ``text``, with the special tokens that the model expects around it.

        Without ``special_tokens`` none are added: for text that has them, such as a rendered chat.

        Raises UserError for text that no UTF-8 can express, such as a broken command line.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError("the prompt is not valid UTF-8 text") from None
        # Only batches leave other threads running meanwhile.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=special_tokens)
        return tuple(encoded.ids)

    def id_of(self, token: str) -> int | None:
        """Id of the token with this text, as the vocabulary writes it; None where it has none."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def characters_per_token(self) -> int | None:
        """Maximum characters of a text, over its tokens; read once, as it takes a while.

        None where text can vanish without a token, so that there is no such number.
        """
        longest = longest_token(json.loads(self._backend.to_str()))
        return None if longest is None else longest * COMPOSED_CHARACTERS_MAX

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids`` without special tokens."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def heard(self, token_ids: Sequence[int]) -> list[int]:
        """Those of ``token_ids`` that have text; the others, such as special tokens, change nothing
        of the text around them."""
        return [token_id for token_id in token_ids if not self._is_silent(token_id)]

    def token_text(self, token_id: int) -> str:
        """One token as text, special ones and a leading space included.

        A token that is a part of a character alone reads ``bytes:\\xe2``, as with OpenAI.
        """
        text = self._piece(token_id)
        if "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.token_bytes(token_id))

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token, which may be a part of a character."""
        name = str(self._backend.id_to_token(token_id) or "")
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])  # byte fallback of SentencePiece
        text = self._piece(token_id)
        if "\ufffd" in text and all(char in BYTE_OF for char in name):
            return bytes(BYTE_OF[char] for char in name)
        return text.encode()

    def _decode_piece(self, token_id: int) -> str:
        """One token decoded. Some decoders drop a text's first space: look at the second of two."""
        once = str(self._backend.decode([token_id], skip_special_tokens=False))
        twice = str(self._backend.decode([token_id, token_id], skip_special_tokens=False))
        return twice[len(once) :] if twice.startswith(once) else once


def _looks_like_a_tag(text: str) -> bool:
    return len(text) > 1 and text.startswith("<") and text.endswith(">")


def _converted(path: Path) -> Any:
    """The tokenizer that transformers makes of the files beside ``path``. Raises UserError."""
    from transformers import AutoTokenizer

    try:
        with read_by_library(path.parent, (*TEXT_FILES, *VOCABULARIES)) as cleaned:
            made = AutoTokenizer.from_pretrained(cleaned, trust_remote_code=False)
            return made.backend_tokenizer
    except Exception as error:
        reason = str(error).strip().splitlines() or [repr(error)]
        raise UserError(f"cannot make a tokenizer of {path}: {reason[0]}") from error


def _add_tokens(backend: Any, directory: Path) -> None:
    """Make ``backend`` what transformers makes of the file: with the tokens that only other files
    name, those with ids in their order and then special ones, and without the file's padding and
    truncation, which are those of training."""
    from tokenizers import AddedToken

    backend.no_padding()
    backend.no_truncation()
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    added = added_tokens(directory)
    made = [
        AddedToken(added[token_id].pop("content"), **added[token_id]) for token_id in sorted(added)
    ]
    backend.add_tokens([token for token in made if repr(token) not in known])
    texts = {token.content for token in backend.get_added_tokens_decoder().values()}
    special = [{**each, "special": True} for each in all_special_tokens(directory)]
    backend.add_tokens(
        [AddedToken(e.pop("content"), **e) for e in special if e["content"] not in texts]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """The text side of a model: its name, and what its directory says of tokens."""

    name: str
    directory: Path | None = None
    """Where the model's tokenizer and its text files are, if anywhere here."""
    tokenizer: Tokenizer | None = None
    """None where prompts and answers are token ids only."""
    stop_token_ids: tuple[int, ...] = ()
    root: str = ""
    """The model's root (:func:`dht.checkpoints.model_files.root_of`); empty: not known."""

    @classmethod
    def load(cls, name: str, directory: Path, root: str) -> "ModelText":
        """What ``directory`` says; raises UserError for a tokenizer that cannot be read."""
        tokenizer = Tokenizer.load(directory)
        known = {} if tokenizer is None else {"id_of": tokenizer.id_of}
        return cls(
            name=name,
            directory=directory,
            tokenizer=tokenizer,
            stop_token_ids=stop_token_ids(directory, **known),
            root=root,
        )

    def prompt_ids(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Token ids of a prompt that is text or ids; raises UserError for what is neither."""
        if not isinstance(prompt, str):
            try:
                if isinstance(
                    prompt, bytes | bytearray | memoryview
                ):  # its numbers are no token ids
                    raise TypeError("these are bytes; decode them first")
                return tuple(operator.index(token_id) for token_id in prompt)
            except TypeError as error:
                raise UserError(f"a prompt is text or a list of token ids: {error}") from None
        if self.tokenizer is None:
            raise UserError(
                f"{self.name} has no tokenizer here: give the model's directory, or the prompt as"
                " token ids"
            )
        return self.tokenizer.encode(prompt)


class Detokenizer:
    """Turns tokens into text pieces as they come; pieces joined equal the whole text decoded.

    A piece is held back while it ends in an unfinished character, for ``UNFINISHED_TOKENS_MAX``
    tokens at most: a peer may send beginnings of characters alone. Only the tokens since the last
    safe boundary are decoded again, so a long answer costs no more per token than a short one.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        """``before`` are tokens of a text that goes on here: behind one, the first space stays."""
        self._tokenizer = tokenizer
        self._token_ids = tokenizer.heard(before[-CHARACTER_BYTES_MAX:])
        if tokenizer.decode(self._token_ids).endswith("\ufffd"):  # its text ends in mid-character
            self._token_ids = []
        self._prefix = 0
        self._read = len(self._token_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these tokens."""
        # A decoder drops the first space of what it is given: that must not be a later token's.
        if not (heard := self._tokenizer.heard(token_ids)):
            return ""
        self._token_ids.extend(heard)
        before = self._tokenizer.decode(self._token_ids[self._prefix : self._read])
        after = self._tokenizer.decode(self._token_ids[self._prefix :])
        unsure = len(self._token_ids) - self._read < UNFINISHED_TOKENS_MAX
        if unsure and after.endswith("\ufffd"):
            return ""
        self._prefix, self._read = self._read, len(self._token_ids)
        return after[len(before) :]

    def flush(self) -> str:
        """The text that was held back, at the end of the answer."""
        before = self._tokenizer.decode(self._token_ids[self._prefix : self._read])
        after = self._tokenizer.decode(self._token_ids[self._prefix :])
        self._prefix = self._read = len(self._token_ids)
        return after[len(before) :]
