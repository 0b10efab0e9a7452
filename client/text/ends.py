"""The tokens that end a model's answers, out of all that its files say of them.

They are those at which vLLM and llama.cpp stop: the ids that the configuration names, the
tokenizer's end of text, and, as checkpoints often name only the end of a text and not that of a
turn, the tokens that end turns by their text.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from dht.checkpoints.hub import ADDED_TOKENS
from dht.messages.session import SESSION_BOUNDS, TokenId
from dht.process.json_file import object_or_empty

TEXT_CONFIGS = ("text_config", "decoder", "generator")
"""Where a configuration of several models keeps the one that answers, as transformers finds it."""
SPECIAL = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
"""Special tokens that all tokenizers may name, in transformers' order."""
FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
TURN_ENDS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
     "<end_of_turn>", "<turn|>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]",
     "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>"}
)  # fmt: skip
"""Tokens that end an answer by their text (llama.cpp, ``src/llama-vocab.cpp``)."""
TOKEN_ID_MAX: int = get_args(TokenId)[1].le
WITHIN = {"<|end|>": {"<|return|>", "<|call|>"}}
"""Tokens that end a part of an answer alone where the vocabulary has the others, too (ibid.)."""


def stop_token_ids(
    directory: Path, id_of: Callable[[str], int | None] = lambda _: None
) -> tuple[int, ...]:
    """Ids of the tokens that end answers of the model in ``directory``, at most half of those that
    a session may have. ``id_of`` is the tokenizer's id of a token, where one was made."""
    found = _named(directory)
    end = special_tokens(directory).get("eos_token", {"content": ""})["content"]
    known = {text: id_of(text) for text in (end, *TURN_ENDS) if text}
    ids = {text: token_id for text, token_id in known.items() if token_id is not None}
    ids, wanted = ids | _ids(directory, end), {end}
    if _has_template(directory):
        wanted |= {t for t in TURN_ENDS if not WITHIN.get(t, {""}) <= ids.keys()}
    found += [ids[text] for text in sorted(wanted & ids.keys())]
    sent = dict.fromkeys(token_id for token_id in found if 0 <= token_id <= TOKEN_ID_MAX)
    return tuple(sent)[: SESSION_BOUNDS.stop_tokens_max // 2]


def added_tokens(directory: Path) -> dict[int, dict[str, Any]]:
    """Tokens that ``tokenizer_config.json`` names, by id: their content and flags, as the
    tokenizers library takes them. Where it names none, those of ``added_tokens.json`` that
    ``tokenizer.json`` does not have, as in transformers."""
    said = object_or_empty(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in said:
        return _of_older_file(directory)
    listed = said["added_tokens_decoder"]
    return {
        int(name): token
        for name, each in (listed.items() if isinstance(listed, dict) else ())
        if name.isdecimal() and isinstance(each, dict) and (token := _token(each))
    }


def _of_older_file(directory: Path) -> dict[int, dict[str, Any]]:
    """The tokens of ``added_tokens.json`` beyond those that ``tokenizer.json`` adds itself."""
    special = {token["content"] for token in all_special_tokens(directory)}
    added = object_or_empty(directory / "tokenizer.json").get("added_tokens")
    known = {
        token.get("id")
        for token in (added if isinstance(added, list) else ())
        if isinstance(token, dict)
    }
    return {
        token_id: {"content": text, "special": text in special, "normalized": text not in special}
        for text, token_id in object_or_empty(directory / ADDED_TOKENS).items()
        if type(token_id) is int and token_id not in known and text
    }


def special_tokens(directory: Path) -> dict[str, dict[str, Any]]:
    """Special tokens by name, such as ``eos_token``, each as :func:`added_tokens` has them."""
    said = _of_both_files(directory)
    more = [said.get(key) for key in ("extra_special_tokens", "model_specific_special_tokens")]
    named = {k: v for each in (said, *more) if isinstance(each, dict) for k, v in each.items()}
    order = {name: at for at, name in enumerate(SPECIAL)}
    return {
        name: token
        for name in sorted(named, key=lambda name: order.get(name, len(order)))
        if name.endswith("_token") and (token := _token(named[name]))
    }


def all_special_tokens(directory: Path) -> list[dict[str, Any]]:
    """:func:`special_tokens` and those without a name, in the order in which transformers adds
    them. ``additional_special_tokens``, the older key, counts where the other says nothing."""
    said = _of_both_files(directory)
    some = said.get("extra_special_tokens") or said.get("additional_special_tokens")
    unnamed = [_token(each) for each in some] if isinstance(some, list) else []
    return [*special_tokens(directory).values(), *filter(None, unnamed)]


def _of_both_files(directory: Path) -> dict[str, Any]:
    """What ``tokenizer_config.json`` and ``special_tokens_map.json`` say. The latter counts where
    the former lists no added tokens, as in transformers; null takes nothing away."""
    config = object_or_empty(directory / "tokenizer_config.json")
    files = [object_or_empty(directory / "special_tokens_map.json"), config]
    files = files if "added_tokens_decoder" in config else files[::-1]
    return {k: v for each in files for k, v in each.items() if v is not None}


def _token(said: Any) -> dict[str, Any]:
    """A token's content and flags, of which a file may name the content alone; empty for what is
    no token."""
    token = said if isinstance(said, dict) else {"content": said}
    if not isinstance(content := token.get("content"), str) or not content:
        return {}
    return {"content": content} | {f: token[f] for f in FLAGS if type(token.get(f)) is bool}


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
    if isinstance(vocabulary, list):  # with a score each, in the order of their ids
        each = (pair[0] if isinstance(pair, list) and pair else None for pair in vocabulary)
        vocabulary = {text: at for at, text in enumerate(each) if isinstance(text, str)}
    known = vocabulary if isinstance(vocabulary, dict) else {}
    ids = {text: known[text] for text in (end,) if type(known.get(text)) is int}
    ids |= {str(token["content"]): token_id for token_id, token in added_tokens(directory).items()}
    for token in listed if isinstance(listed, list) else ():
        if isinstance(token, dict) and type(token.get("id")) is int:
            ids[str(token.get("content"))] = token["id"]
    return ids


def _has_template(directory: Path) -> bool:
    """Whether the model is one to chat with."""
    said = object_or_empty(directory / "tokenizer_config.json")
    files = ("chat_template.jinja", "chat_template.json")
    return bool(said.get("chat_template")) or any((directory / name).is_file() for name in files)
