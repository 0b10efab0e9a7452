"""The longest text behind one token, where a tokenizer has such a thing."""

import json
from typing import Any

import pytest

from client.text.vocabulary import longest_token
from testing.paths import ROOT

BROOK: dict[str, Any] = json.loads((ROOT / "models/brook/tokenizer.json").read_text())
LLAMA: dict[str, Any] = {
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    },
    "pre_tokenizer": None,
    "added_tokens": [{"content": "<|begin_of_text|>", "lstrip": False, "rstrip": False}],
    "model": {
        "type": "BPE",
        "byte_fallback": True,
        "vocab": {f"<0x{byte:02X}>": byte for byte in range(256)},
    },
}


def test_the_longest_token_counts_special_ones() -> None:
    assert longest_token(BROOK) == 14
    assert longest_token(LLAMA) == len("<|begin_of_text|>")


@pytest.mark.parametrize(
    ("of", "change"),
    [
        (LLAMA, {"model": {**LLAMA["model"], "byte_fallback": False}}),
        (LLAMA, {"model": {**LLAMA["model"], "vocab": {"a": 0}}}),
        (LLAMA, {"model": {**LLAMA["model"], "type": "WordLevel"}}),
        (LLAMA, {"model": {"type": "Unigram", "vocab": [["a", 0.0]]}}),
        (LLAMA, {"added_tokens": [{"content": "<|end|>", "lstrip": False, "rstrip": True}]}),
        (LLAMA, {"normalizer": {"type": "Strip"}}),
        (LLAMA, {"normalizer": {"type": "Precompiled"}}),
        (LLAMA, {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": "▁"}}),
        (LLAMA, {"normalizer": {"type": "Replace", "pattern": {"String": "  "}, "content": "▁"}}),
        (LLAMA, {"pre_tokenizer": {"type": "WhitespaceSplit"}}),
        (LLAMA, {"pre_tokenizer": {"type": "Split", "behavior": "Removed"}}),
        (BROOK, {"model": {**BROOK["model"], "vocab": {"a": 0}}}),
    ],
)
def test_there_is_none_where_text_can_vanish(of: dict[str, Any], change: dict[str, Any]) -> None:
    assert longest_token({**of, **change}) is None
