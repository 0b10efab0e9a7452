"""What the names in a tokenizer's vocabulary stand for. Pure."""

from collections.abc import Iterator
from typing import Any


def _byte_alphabet() -> dict[str, int]:
    """The bytes behind the characters of a byte-level vocabulary (GPT-2)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + at): byte for at, byte in enumerate(hidden)
    }


BYTE_OF = _byte_alphabet()
COMPOSED_CHARACTERS_MAX = 4
"""Maximum characters that Unicode's normal forms compose to one."""
KEEPING = frozenset(
    {"NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace", "ByteLevel", "Metaspace", "Split",
     "Punctuation", "Digits"}
)  # fmt: skip
"""Steps before the vocabulary that drop no text, as :func:`_keeps` reads them."""


def longest_token(tokenizer: dict[str, Any]) -> int | None:
    """Number of characters of the longest token in a ``tokenizer.json``.

    None where text of any length can become no token or a single one: where a step before the
    vocabulary drops some of it, a special token takes blanks along, or the vocabulary has no token
    for some byte, so that an unknown stretch is one token.
    """
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    vocab = model.get("vocab")
    steps = [*_steps(tokenizer.get("normalizer")), *_steps(tokenizer.get("pre_tokenizer"))]
    if model.get("type") != "BPE" or not isinstance(vocab, dict):
        return None
    if not all(map(_keeps, steps)) or any(each["lstrip"] or each["rstrip"] for each in added):
        return None
    by_bytes = any(step["type"] == "ByteLevel" for step in steps)
    if not by_bytes and not model.get("byte_fallback"):
        return None
    names = BYTE_OF if by_bytes else [f"<0x{byte:02X}>" for byte in range(256)]
    if not all(name in vocab for name in names):
        return None
    return max(map(len, (*vocab, *(each["content"] for each in added))))


def _steps(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, one by one."""
    if step is None:
        return
    parts = step.get("normalizers") or step.get("pretokenizers")
    if parts is None:
        yield step
    for part in parts or ():
        yield from _steps(part)


def _keeps(step: dict[str, Any]) -> bool:
    """Whether a step drops no text and shortens it by normal forms at most."""
    if step["type"] == "Replace":
        replaced = step["pattern"].get("String")
        return replaced is not None and len(replaced) <= len(step["content"])
    return step["type"] in KEEPING and step.get("behavior") != "Removed"
