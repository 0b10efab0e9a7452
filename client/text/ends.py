"""The tokens that end a model's answers, out of all that its files say of them.

They are those at which vLLM and llama.cpp stop: the ids that the configuration names, the
tokenizer's end of text, and, as checkpoints often name only the end of a text and not that of a
turn, the tokens that end turns by their text.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dht.json_file import object_or_empty
from dht.messages.session import STOP_TOKENS_MAX

TEXT_CONFIGS = ("text_config", "decoder", "generator")
"""Where a configuration of several models keeps the one that answers, as transformers finds it."""
FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
TURN_ENDS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
     "<end_of_turn>", "<turn|>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]",
     "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>"}
)  # fmt: skip
"""Tokens that end an answer by their text (llama.cpp, ``src/llama-vocab.cpp``)."""
WITHIN = {"<|end|>": {"<|return|>", "<|call|>"}}
"""Tokens that end a part of an answer alone where the vocabulary has the others, too (ibid.)."""


def stop_token_ids(directory: Path) -> tuple[int, ...]:
    """Ids of the tokens that end answers of the model in ``directory``, at most half of those that
    a session may have."""
    found = _named(directory)
    said = object_or_empty(directory / "tokenizer_config.json")
    end = {**object_or_empty(directory / "special_tokens_map.json"), **said}.get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    end = end if isinstance(end, str) else ""
    ids, wanted = _ids(directory, end), {end}
    if _has_template(directory, said):
        wanted |= {t for t in TURN_ENDS if not WITHIN.get(t, {""}) <= ids.keys()}
    found += [ids[text] for text in sorted(wanted & ids.keys())]
    return tuple(dict.fromkeys(found))[: STOP_TOKENS_MAX // 2]


def added_tokens(directory: Path) -> dict[int, dict[str, Any]]:
    """Tokens that ``tokenizer_config.json`` names, by id: their content and flags, as the
    tokenizers library takes them."""
    said = object_or_empty(directory / "tokenizer_config.json").get("added_tokens_decoder")
    return {
        int(name): {"content": token["content"]}
        | {flag: token[flag] for flag in FLAGS if type(token.get(flag)) is bool}
        for name, token in (said.items() if isinstance(said, dict) else ())
        if name.isdecimal() and isinstance(token, dict) and _is_text(token.get("content"))
    }


def _is_text(said: Any) -> bool:
    return isinstance(said, str) and bool(said)


def _named(directory: Path) -> list[int]:
    """What the configuration names; the generation file's word goes first."""
    for name in ("generation_config.json", "config.json"):
        config = object_or_empty(directory / name)
        for each in (config, *_text_configs(config)):
            said = each.get("eos_token_id")
            ids = said if isinstance(said, list) else [said]
            if found := [each for each in ids if type(each) is int and each >= 0]:
                return found
    return []


def _text_configs(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The configurations within one, the outermost first."""
    for key in TEXT_CONFIGS:
        if isinstance(inner := config.get(key), dict):
            yield inner


def _ids(directory: Path, end: str) -> dict[str, int]:
    """Ids of the tokens beside the plain vocabulary, and of ``end``, by their text."""
    whole = object_or_empty(directory / "tokenizer.json")
    model, listed = whole.get("model"), whole.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    known = vocabulary if isinstance(vocabulary, dict) else {}
    ids = {text: known[text] for text in (end,) if type(known.get(text)) is int}
    ids |= {str(token["content"]): token_id for token_id, token in added_tokens(directory).items()}
    for token in listed if isinstance(listed, list) else ():
        if isinstance(token, dict) and type(token.get("id")) is int:
            ids[str(token.get("content"))] = token["id"]
    return ids


def _has_template(directory: Path, said: Mapping[str, Any]) -> bool:
    """Whether the model is one to chat with."""
    files = ("chat_template.jinja", "chat_template.json")
    return bool(said.get("chat_template")) or any((directory / name).is_file() for name in files)
