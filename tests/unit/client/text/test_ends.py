"""Where answers end: the union of what vLLM and llama.cpp stop at."""

import json
from pathlib import Path
from typing import Any

import pytest

from client.text.ends import stop_token_ids

Files = dict[str, Any]
TEXT = {"7": {"content": "<|im_end|>"}, "5": {"content": "<|endoftext|>"}}
TURNS: Files = {"eos_token": "<|im_end|>", "added_tokens_decoder": TEXT}
TEMPLATE = "{{ messages[0].content }}"
HARMONY = {
    "1": {"content": "<|return|>"},
    "2": {"content": "<|end|>"},
    "3": {"content": "<|call|>"},
}


def tokens(**ids: int) -> list[dict[str, Any]]:
    return [{"id": token_id, "content": f"<{text}>"} for text, token_id in ids.items()]


CASES: dict[str, tuple[tuple[int, ...], Files]] = {
    "a list": (
        (1, 106),
        {"config": {"eos_token_id": 1}, "generation_config": {"eos_token_id": [1, 106]}},
    ),
    "only in the text's configuration": ((9,), {"config": {"text_config": {"eos_token_id": 9}}}),
    "a list there": (
        (9, 8),
        {"config": {"text_config": {"eos_token_id": [9, 8]}}, "generation_config": {"top_k": 7}},
    ),
    "the end of a text, and the tokenizer's of a turn": (
        (5, 7),
        {"generation_config": {"eos_token_id": 5}, "tokenizer_config": TURNS},
    ),
    "the tokenizer's alone": ((7,), {"config": {}, "tokenizer_config": TURNS}),
    "the tokenizer's, in its map": (
        (3,),
        {
            "special_tokens_map": {"eos_token": {"content": "</s>"}},
            "tokenizer": {"model": {"vocab": {"</s>": 3}}, "added_tokens": []},
        },
    ),
    "the map's, where the configuration says null": (
        (3,),
        {
            "tokenizer_config": {"eos_token": None, "added_tokens_decoder": {}},
            "special_tokens_map": {"eos_token": "</s>"},
            "tokenizer": {"model": {"vocab": {"</s>": 3}}},
        },
    ),
    "the map's before the configuration's that lists no tokens": (
        (4,),
        {
            "tokenizer_config": {"eos_token": "<|endoftext|>"},
            "special_tokens_map": {"eos_token": "</s>"},
            "tokenizer": {"model": {"vocab": [["<|endoftext|>", 0.0], [3], 4, None, ["</s>", 1]]}},
        },
    ),
    "null, and the configuration's": (
        (5,),
        {"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": 5}},
    ),
    "no id, and the configuration's": (
        (5, 7),
        {"generation_config": {"eos_token_id": []}, "config": {"eos_token_id": [5, 7]}},
    ),
    "the generation file before the configuration": (
        (5,),
        {"generation_config": {"eos_token_id": [5]}, "config": {"eos_token_id": [5, 7]}},
    ),
    "what is no id": ((), {"config": {"eos_token_id": [True, -1, "2", 1.0, 1 << 70]}}),
    "what is no id of a tokenizer": (
        (),
        {
            "tokenizer_config": {"eos_token": "</s>"},
            "tokenizer": {"model": {"vocab": {"</s>": 1 << 70}}},
        },
    ),
    "a chat whose tokenizer names the end of a text alone": (
        (5, 7),
        {
            "config": {"eos_token_id": 5},
            "tokenizer_config": {**TURNS, "eos_token": "<|endoftext|>", "chat_template": TEMPLATE},
        },
    ),
    "a chat by the tokenizer's file": (
        (1, 4),
        {
            "config": {"eos_token_id": 1},
            "tokenizer_config": {"chat_template": TEMPLATE},
            "tokenizer": {"added_tokens": tokens(end_of_turn=4, eos=1, start_of_turn=3)},
        },
    ),
    "no chat": (
        (5,),
        {"config": {"eos_token_id": 5}, "tokenizer_config": {"added_tokens_decoder": TEXT}},
    ),
    "a part of an answer": (
        (1, 3),
        {
            "config": {"eos_token_id": 1},
            "tokenizer_config": {"added_tokens_decoder": HARMONY, "chat_template": TEMPLATE},
        },
    ),
    "a token that an older file adds": (
        (1, 7),
        {
            "config": {"eos_token_id": 1},
            "tokenizer_config": {"chat_template": TEMPLATE},
            "tokenizer": {"added_tokens": tokens(eos=1)},
            "added_tokens": {"<|im_end|>": 7, "<pad>": 8},
        },
    ),
    "strange files": (
        (),
        {
            "tokenizer_config": {"added_tokens_decoder": [1], "eos_token": 4},
            "tokenizer": {"model": 3},
        },
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_ends_are_all_that_the_files_name(name: str, tmp_path: Path) -> None:
    ends, files = CASES[name]
    for file, said in files.items():
        (tmp_path / f"{file}.json").write_text(json.dumps(said))
    assert set(stop_token_ids(tmp_path)) == set(ends)


def test_ends_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": list(range(1000))}))
    assert stop_token_ids(tmp_path) == tuple(range(32))


def test_ends_are_found_in_a_tokenizer_that_was_made_of_other_files(tmp_path: Path) -> None:
    told = {"eos_token": "</s>", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    ids = {"</s>": 2, "<|im_end|>": 9, "word": 4}
    assert set(stop_token_ids(tmp_path, ids.get)) == {2, 9}
