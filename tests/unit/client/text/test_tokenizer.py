"""Pieces join to the whole text."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from transformers import AutoTokenizer

from client.answer.generation import GenerationOptions
from client.text.tokenizer import (
    UNFINISHED_TOKENS_MAX,
    Detokenizer,
    ModelText,
    Tokenizer,
)
from dht.errors import UserError
from dht.messages.types import layers_text
from testing.paths import ROOT

MODEL = ROOT / "models" / "brook"


class _Bytes:
    """A tokenizer whose tokens are UTF-8 bytes, so that most characters span several tokens."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(ids).decode("utf-8", errors="replace")


@given(text=st.text(), sizes=st.lists(st.integers(1, 5)))
def test_pieces_join_to_the_text(text: str, sizes: list[int]) -> None:
    ids = list(text.encode("utf-8", errors="ignore"))
    expected = bytes(ids).decode()
    detokenizer = Detokenizer(Tokenizer(_Bytes()))
    pieces = []
    while ids:
        size = sizes.pop() if sizes else 1
        pieces.append(detokenizer.push(ids[:size]))
        ids = ids[size:]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == expected


def test_characters_that_never_end_cost_no_more_with_each_token() -> None:
    decoded: list[int] = []

    class Counting(_Bytes):
        def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
            decoded.append(len(ids))
            return super().decode(ids, skip_special_tokens)

    detokenizer = Detokenizer(Tokenizer(Counting()))
    text = "".join(detokenizer.push([0xE2]) for _ in range(2000)) + detokenizer.flush()
    assert text == "\ufffd" * 2000
    assert max(decoded) <= 2 * UNFINISHED_TOKENS_MAX


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": 1e9},
        {"top_p": -0.1},
        {"top_p": 1.5},
        {"top_k": -1},
        {"seed": -1},
        {"max_new_tokens": 0},
        {"max_new_tokens": -5},
        {"grammar": "\ud800"},
        {"cache_salt": "\ud800"},
        {"cache_salt": b"salt"},
    ],
)
def test_absurd_options_are_refused_in_plain_words(options: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        GenerationOptions(**options)  # type: ignore[arg-type]


def test_a_prompt_beyond_the_context_says_by_how_much() -> None:
    with pytest.raises(UserError, match="300 tokens; this model's context is 256"):
        GenerationOptions().new_tokens(300, 256)
    with pytest.raises(UserError, match="room for 56"):
        GenerationOptions(max_new_tokens=57).new_tokens(200, 256)
    assert GenerationOptions().new_tokens(200, 256) == 56


@pytest.mark.parametrize("prompt", [b"One", bytearray(b"One"), memoryview(b"One"), None, 1, [1.0]])
def test_what_is_no_prompt_is_refused_in_plain_words(prompt: Any) -> None:
    with pytest.raises(UserError, match="a prompt is text or a list of token ids"):
        ModelText(name="brook").prompt_ids(prompt)


def test_layers_as_people_count_them() -> None:
    assert layers_text((3, 4)) == "layer 3"
    assert layers_text((3, 6)) == "layers 3-5"
    assert layers_text((0, 2), (5, 6)) == "layers 0-1 and 5"


def test_one_token_as_text_and_as_bytes() -> None:
    tokenizer = Tokenizer.load(MODEL)
    assert tokenizer is not None
    text = "Once upon é ☃"
    ids = tokenizer.encode(text, special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids).decode() == text
    texts = [tokenizer.token_text(token_id) for token_id in ids]
    assert texts[:2] == ["Once", " upon"]
    assert texts[-3:] == ["bytes:\\xe2", "bytes:\\x98", "bytes:\\x83"]
    first, *rest = tokenizer.encode(text)
    assert tuple(rest) == ids, "special tokens come in front"
    assert tokenizer.token_text(first) == "<|bos|>"
    assert tokenizer.token_text(1 << 20) == ""


class _Spaces:
    """A decoder that drops the space in front of a text's first token, as SentencePiece's does."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join({1: " a", 2: "b", 3: "\ufffd"}[token_id] for token_id in ids).lstrip(" ")

    def id_to_token(self, token_id: int) -> str:
        return {1: "▁a", 2: "b", 3: "<0xE2>"}[token_id]


def test_a_tokenizer_is_made_of_what_an_older_model_has(tmp_path: Path) -> None:
    letters = {letter: at for at, letter in enumerate("helo")}
    made = BPE({**letters, "he": 4, "ll": 5}, [("h", "e"), ("l", "l")])
    made.save(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("hello") == (4, 5, 3)
    (tmp_path / "merges.txt").write_text("no merge")
    (tmp_path / "vocab.json").write_text("{")
    with pytest.raises(UserError, match="cannot make a tokenizer of"):
        Tokenizer.load(tmp_path)


def test_a_leading_space_belongs_to_its_token() -> None:
    tokenizer = Tokenizer(_Spaces())
    assert [tokenizer.token_text(n) for n in (1, 2, 3)] == [" a", "b", "bytes:\\xe2"]
    assert [tokenizer.token_bytes(n) for n in (1, 2, 3)] == [b" a", b"b", b"\xe2"]


def test_marks_that_are_special_tokens_can_be_shown() -> None:
    backend = Backend.from_file(str(MODEL / "tokenizer.json"))
    backend.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    backend.add_special_tokens([AddedToken("<|other|>", special=True)])
    hidden = Tokenizer(backend)
    marks = ("[TOOL_CALLS]", "<tool_call>")
    ids = hidden.encode("a [TOOL_CALLS]b<|other|>", special_tokens=False)
    (mark,) = hidden.mark_tokens(marks).values()
    assert mark in ids
    shown = hidden.showing(marks)
    assert shown.encode("a [TOOL_CALLS]b<|other|>", special_tokens=False) == ids
    assert "[TOOL_CALLS]" not in hidden.decode(ids)
    assert "[TOOL_CALLS]" in shown.decode(ids)
    assert "<|other|>" not in shown.decode(ids)


@pytest.mark.parametrize("at", ["load", "encode"])
def test_a_panic_of_the_library_is_a_user_error(tmp_path: Path, at: str) -> None:
    """tokenizers is written in Rust, whose panics are no ``Exception`` in Python."""
    said = json.loads((MODEL / "tokenizer.json").read_text())
    if at == "load":
        said["model"]["continuing_subword_prefix"] = "c:x"
    else:
        del said["post_processor"]["special_tokens"]["<|bos|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(said))

    def use() -> None:
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer is not None
        tokenizer.encode("Once")

    with pytest.raises(UserError, match=r"tokenizer"):
        use()


PIECES = ("▁a", "b", "▁", "▁▁", "<0x41>", "<0xC3>", "<0xA9>")
MARKS = ("[X]", "[Y]")


def _decoders() -> dict[str, Any]:
    bytes_ = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return {
        "metaspace": decoders.Metaspace(),
        "bytes": decoders.Sequence([*bytes_, decoders.Strip(" ", 1, 0)]),
        "words": decoders.WordPiece("b"),
    }


@pytest.mark.parametrize("decoder", list(_decoders()))
@given(chosen=st.lists(st.integers(0, 6), max_size=12), size=st.integers(1, 3))
def test_special_tokens_take_no_space_from_the_stream(
    decoder: str, chosen: list[int], size: int
) -> None:
    backend = Backend(BPE({piece: at for at, piece in enumerate(PIECES[:4])}, []))
    backend.decoder = _decoders()[decoder]
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer = Tokenizer(backend)
    stream = Detokenizer(tokenizer)
    parts = [stream.push(chosen[at : at + size]) for at in range(0, len(chosen), size)]
    assert "".join(parts) + stream.flush() == tokenizer.decode(chosen)


@pytest.mark.parametrize("decoder", list(_decoders()))
@given(
    before=st.lists(st.integers(0, 3), max_size=6),
    chosen=st.lists(st.integers(0, 5), max_size=6),
)
def test_a_text_that_goes_on_keeps_its_space(
    decoder: str, before: list[int], chosen: list[int]
) -> None:
    backend = Backend(BPE({piece: at for at, piece in enumerate(PIECES[:4])}, []))
    backend.decoder = _decoders()[decoder]
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer = Tokenizer(backend)
    stream = Detokenizer(tokenizer, before)
    text = "".join(stream.push([token_id]) for token_id in chosen) + stream.flush()
    assert tokenizer.decode(before) + text == tokenizer.decode([*before, *chosen])


@given(text=st.text(max_size=4), cut=st.integers(0, 16))
def test_a_prompt_that_ends_in_mid_character_takes_no_text_away(text: str, cut: int) -> None:
    ids = list(text.encode("utf-8", errors="ignore"))
    stream = Detokenizer(Tokenizer(_Bytes()), ids[:cut])
    behind = "".join(stream.push([each]) for each in [*ids[cut:], *b"end"])
    whole = [char for char in text if char.encode(errors="ignore")]
    later = [char for at, char in enumerate(whole) if len("".join(whole[:at]).encode()) >= cut]
    assert behind.endswith("".join((*later, "end")))


@pytest.mark.parametrize(
    "more",
    [
        {"truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst"}},
        {"padding": {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}},
    ],
    ids=["truncation", "padding"],
)
def test_prompts_are_whole_and_no_longer_whatever_the_file_says(
    more: dict[str, Any], tmp_path: Path
) -> None:
    pad = {"pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"}
    [(section, told)] = more.items()
    file = json.loads((MODEL / "tokenizer.json").read_text())
    file[section] = {**told, **(pad if section == "padding" else {"stride": 0})}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    plain, own = Tokenizer.load(MODEL), Tokenizer.load(tmp_path)
    assert plain is not None
    assert own is not None
    text = "One morning the river was quiet and the little boat went down to the sea."
    assert own.encode(text) == plain.encode(text)
    assert own.showing(["<|bos|>"]).encode(text) == plain.encode(text)


def test_tokens_that_only_the_configuration_names_are_known(tmp_path: Path) -> None:
    """As transformers adds them: in the order of their ids, with their flags."""
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    size = Backend.from_file(str(MODEL / "tokenizer.json")).get_vocab_size()
    added = {
        str(size + 1): {"content": "<tool>", "special": False},
        str(size): {"content": "<|turn|>", "special": True},
        "x": {"content": 3},
    }
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    ids = tokenizer.encode("<|turn|><tool>", special_tokens=False)
    assert ids == (size, size + 1)
    assert tokenizer.decode(ids) == "<tool>"


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_special_tokens_that_only_other_files_name_are_special(file: str, tmp_path: Path) -> None:
    """As transformers adds them, though the plain vocabulary may have them."""
    made = Backend(BPE({"a": 0, "<e>": 1}, []))
    made.save(str(tmp_path / "tokenizer.json"))
    told = {"additional_special_tokens": ["<more>", "<x>"], "eos_token": "<e>"}
    (tmp_path / file).write_text(json.dumps(told))
    tokenizer = Tokenizer.load(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer is not None
    for text in ("a<e>a", "a<more><x>", "a <x>"):
        assert tokenizer.encode(text) == tuple(theirs.encode(text)), text
    assert tokenizer.encode("a<e>") == (0, 1)
    assert tokenizer.decode((0, 1, 2, 3)) == "a"


@pytest.mark.parametrize("listed", [False, True])
def test_tokens_of_an_older_file_count_where_the_configuration_lists_none(
    listed: bool, tmp_path: Path
) -> None:
    """Ids of a fine-tune's own tokens, as transformers gives them: in the order of their ids, with
    what ``tokenizer.json`` says of its own; special where the configuration names them."""
    made = Backend(BPE({"a": 0, "<": 1, "e": 2, ">": 3, "A": 4}, []))
    made.normalizer = normalizers.Lowercase()
    made.add_special_tokens([AddedToken("<e>", special=True)])
    made.save(str(tmp_path / "tokenizer.json"))
    told: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<A>"}
    if listed:
        told["added_tokens_decoder"] = {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    added = {"<AE>": 7, "<A>": 6, "<e>": 5}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    tokenizer = Tokenizer.load(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer is not None
    for text in ("a<A>a", "a<AE>", "a<ae>", "a<e>a<a>"):
        assert tokenizer.encode(text) == tuple(theirs.encode(text)), text
    for ids in ([0, 5, 6, 7], [7, 0]):
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (tokenizer.id_of("<AE>") is None) is listed


def test_special_tokens_are_text_where_the_model_says_so(tmp_path: Path) -> None:
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    whole = json.loads((MODEL / "tokenizer.json").read_text())
    (special, *_) = (each["content"] for each in whole["added_tokens"] if each["special"])
    for split in (False, True):
        config = {"split_special_tokens": split}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer is not None
        assert (len(tokenizer.encode(special, special_tokens=False)) > 1) is split
        shown = tokenizer.showing([])
        assert (len(shown.encode(special, special_tokens=False)) > 1) is split


def test_the_newer_list_of_special_tokens_goes_before_the_older_one(tmp_path: Path) -> None:
    """As with transformers, whose ids of the tokens in it would otherwise be others."""
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    both = {"additional_special_tokens": ["<old>"], "extra_special_tokens": ["<new>"]}
    for config, known in ((both, ["<new>"]), ({**both, "extra_special_tokens": []}, ["<old>"])):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer is not None
        found = [text for text in ("<old>", "<new>") if tokenizer.id_of(text) is not None]
        assert found == known


def test_bytes_are_no_prompt() -> None:
    text = ModelText(name="brook", tokenizer=None, stop_token_ids=())
    with pytest.raises(UserError, match="these are bytes; decode them first"):
        text.prompt_ids(b"One morning")
    assert text.prompt_ids([1, 2]) == (1, 2)
