"""A GGUF file's tokenizer: the file's own token ids, or refused by the name of its splits."""

from pathlib import Path
from typing import Any

import gguf
import pytest

from dht.checkpoints.gguf_tokenizer import gguf_tokenizer

BYTES = [*"the12Ġsbark'", "th", "the", "Ġ1", "12", "bark"]
PIECES = ["<unk>", "<b>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "▁", "a", "▁a", "b"]


def made(folder: Path, **said: Any) -> Any:
    """The tokenizer of a file of these values, by their keys behind ``tokenizer.ggml.``."""
    file = folder / "tokens.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in said.items():
        name = f"tokenizer.{key}" if key.startswith("chat") else f"tokenizer.ggml.{key}"
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
        add.get(type(value), writer.add_array)(name.replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return gguf_tokenizer(file)


def by_bytes(folder: Path, pre: str | None, **more: Any) -> Any:
    said = {"model": "gpt2", "tokens": [*BYTES, "<b>"], "token_type": [1] * len(BYTES) + [3]}
    merges = ["t h", "th e", "Ġ 1", "1 2"]
    named = {} if pre is None else {"pre": pre}
    bos = {"bos_token_id": len(BYTES), "merges": merges}
    return made(folder, **{**said, **bos, **named, **more})


def words_of(tokenizer: Any, text: str) -> list[str]:
    return list(tokenizer.convert_ids_to_tokens(tokenizer.encode(text)))


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        (None, "the Ġ1 2 ' s"),
        ("gpt-2", "the Ġ1 2 ' s"),
        ("smollm", "the Ġ 1 2 ' s"),
        ("stablelm2", "the Ġ 1 2 ' s"),
        ("glm4", "the Ġ 12 ' s"),
    ],
)
def test_text_is_split_as_the_file_names_it(pre: str | None, words: str, tmp_path: Path) -> None:
    assert words_of(by_bytes(tmp_path, pre), "the 12's") == words.split()


@pytest.mark.parametrize("pre", ["deepseek-llm", "default", "spiral"])
def test_splits_that_nobody_knows_are_refused_by_name(pre: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=pre):
        by_bytes(tmp_path, pre)


def test_what_comes_with_a_name_is_set(tmp_path: Path) -> None:
    """A word that is a token is that token; a prompt begins as llama.cpp begins it."""
    assert words_of(by_bytes(tmp_path, "llama-bpe"), "bark") == ["<b>", "bark"]
    assert words_of(by_bytes(tmp_path, "gpt-2"), "bark") == ["b", "a", "r", "k"]
    told = by_bytes(tmp_path, "llama-bpe", add_bos_token=False)
    assert words_of(told, "bark") == ["bark"]


@pytest.mark.parametrize(("prefix", "words"), [(True, ["▁a", "▁a"]), (False, ["a", "▁a"])])
def test_the_space_in_front_is_the_files_own(
    prefix: bool, words: list[str], tmp_path: Path
) -> None:
    kinds = [2, 3, 3, *[6] * 256, 1, 1, 1, 1]
    scores = [0.0] * 259 + [-4.0, -3.0, -1.0, -2.0]
    said = {"model": "llama", "tokens": PIECES, "token_type": kinds, "scores": scores}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    tokenizer = made(tmp_path, **said, **ids, add_space_prefix=prefix, add_bos_token=False)
    assert words_of(tokenizer, "a a") == words
    assert tokenizer.decode(tokenizer.encode("a a")) == "a a"


def test_the_template_for_functions_is_kept(tmp_path: Path) -> None:
    both = {"chat_template": "plain", "chat_template__tool_use": "tools"}
    tokenizer = by_bytes(tmp_path, "gpt-2", **both, chat_template__rag="x")
    assert tokenizer.chat_template == {"default": "plain", "tool_use": "tools"}


def test_every_token_has_the_id_of_its_place(tmp_path: Path) -> None:
    """Those that stand in the text as they are, too, whatever characters they have."""
    whole = ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<think>", "two words"]
    tokens, first = [*BYTES, *whole], len(BYTES)
    tokenizer = by_bytes(
        tmp_path,
        "deepseek-r1-qwen",
        tokens=tokens,
        token_type=[1] * first + [3, 3, 4, 4],
        bos_token_id=first,
        eos_token_id=first + 1,
        add_bos_token=True,
    )
    ids = tokenizer.encode("<｜User｜>the<think>two words")
    assert ids == [first, first + 1, tokens.index("the"), first + 2, first + 3]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (first, first + 1)
    assert tokenizer.decode(ids) == "".join([whole[0], "<｜User｜>the<think>two words"])
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the<think>two words"
    assert len(tokenizer) == len(tokens)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_text_that_names_a_special_token_of_another_model_is_text(
    model: str, tmp_path: Path
) -> None:
    """A library's class has names of its own for special tokens, which no file of ours holds."""
    if model == "gpt2":
        tokens = [*dict.fromkeys([*BYTES, *"<|endoftext>"]), "<b>"]
        said: dict[str, Any] = {"merges": ["t h"], "bos_token_id": len(tokens) - 1}
    else:
        tokens = [*PIECES, "<", "s", ">"]
        said = {"scores": [0.0] * len(tokens), "bos_token_id": 1, "unknown_token_id": 0}
    kinds = [3 if text == "<b>" else 1 for text in tokens]
    tokenizer = made(tmp_path, model=model, tokens=tokens, token_type=kinds, **said)
    assert max(tokenizer.encode("<|endoftext|>" if model == "gpt2" else "<s>")) < len(tokens)


@pytest.mark.parametrize(("pre", "composed"), [("qwen2", True), ("gpt-2", False)])
def test_qwens_vocabularies_compose_characters(pre: str, composed: bool, tmp_path: Path) -> None:
    tokens = [*"eÃ©Ìģ", "Ã©", "<b>"]
    said = {"tokens": tokens, "token_type": [1] * 6 + [3], "bos_token_id": 6}
    tokenizer = by_bytes(tmp_path, pre, **said, merges=["Ã ©"])
    assert (words_of(tokenizer, "e\u0301") == ["Ã©"]) is composed
