"""A GGUF file's tokenizer: what transformers makes of the metadata, and what it leaves out of them.

llama.cpp names how text is split before its vocabulary (``tokenizer.ggml.pre``), and with the name
come settings that no key states (``src/llama-vocab.cpp``). transformers knows some of the names and
splits as GPT-2 for all others, whose token ids would be others than those of training; those are
refused here, and the name is told.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SAME_SPLITS = {"stablelm2": "qwen2", "hunyuan": "qwen2", "glm4": "llama3", "chatglm-bpe": "llama3"}
"""Names for splits that transformers knows by another name."""
AS_GPT2 = frozenset(
    {None, "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4",
     "gigachat", "a.x-4.0", "mellum"}
)  # fmt: skip
"""Names for GPT-2's own splits; so were files made that name none."""
DIGIT_BY_DIGIT = frozenset(
    {"starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"}
)
"""Names for GPT-2's splits between digits."""
WHOLE_WORDS = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
     "jina-v5-nano", "tekken"}
)  # fmt: skip
"""Names of vocabularies whose tokens are taken whole where a word is one, whatever the merges say,
and that begin a prompt unless a file says otherwise."""
TOOL_USE = "tokenizer.chat_template.tool_use"
COMPOSED = frozenset({"qwen2", "qwen35"})
"""Names of Qwen's vocabularies, which compose characters (NFC) before all else."""
SPECIAL_OF = {3: True, 4: False}
"""Types of tokens that stand in the text as they are, control and user-defined ones, and whether
they are special (``llama_token_type``)."""
NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def gguf_tokenizer(file: Path) -> Any:
    """The tokenizer of transformers for the file; raises ValueError where it cannot be the file's
    own, and whatever transformers raises for strange metadata."""
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import (
        convert_gguf_tokenizer,
        get_gguf_tokenizer,
        read_gguf_metadata,
    )
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    architecture, said, settings = get_gguf_tokenizer(str(file))
    by_bytes, splits = said.get("tokenizer_type") == "gpt2", said.get("pre_tokenizer_type")
    said["pre_tokenizer_type"] = SAME_SPLITS.get(splits, splits)
    known = AS_GPT2 | DIGIT_BY_DIGIT | GGUF_PRE_TOKENIZER_SPLITS.keys()
    if by_bytes and said["pre_tokenizer_type"] not in known:
        raise ValueError(f"how tokenizer.ggml.pre {str(splits)[:60]!r} splits text is not known")
    if splits in WHOLE_WORDS:
        settings.setdefault("add_bos_token", True)
    metadata, _ = read_gguf_metadata(str(file))
    if isinstance(metadata.get(TOOL_USE), str):
        default = {"default": text} if (text := settings.get("chat_template")) else {}
        settings["chat_template"] = {**default, "tool_use": metadata[TOOL_USE]}
    named = {str(settings[name]) for name in NAMED if settings.get(name)}
    if by_bytes:
        backend, more = _by_bytes(said, named), {}
    else:
        backend, more = convert_gguf_tokenizer(architecture, said)
    if backend.get_vocab_size() > len(said["tokens"]):  # a class's own names of special tokens
        whole = json.loads(backend.to_str())
        count = len(said["tokens"])
        whole["added_tokens"] = [each for each in whole["added_tokens"] if each["id"] < count]
        backend = Tokenizer.from_str(json.dumps(whole))
    if by_bytes and splits in DIGIT_BY_DIGIT:
        each = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([each, words])
    if by_bytes and splits in COMPOSED:
        backend.normalizer = normalizers.NFC()
    if by_bytes and splits in WHOLE_WORDS:
        backend.model.ignore_merges = True
    if not by_bytes and said.get("add_prefix_space") is False:
        backend.normalizer, backend.pre_tokenizer = normalizers.Replace(" ", "▁"), None
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings, **more)


def _by_bytes(said: Mapping[str, Any], named: set[str]) -> Any:
    """A byte-level tokenizer of a file's tokens, each with its own id.

    Tokens that stand in the text as they are, and ``named`` ones, keep their spelling: transformers
    respells those that are not in the byte alphabet (DeepSeek's), and gives them ids beyond the
    vocabulary.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_PRE_TOKENIZER_SPLITS,
        get_merges,
    )

    tokens, spelling = said["tokens"], bytes_to_unicode()
    kinds = dict(zip(tokens, said.get("token_type") or (), strict=False))
    plain = {token for token in tokens if kinds.get(token) in SPECIAL_OF} | named
    alphabet = set(spelling.values())

    def spelled(token: str) -> str:
        if token in plain or set(token) <= alphabet:
            return token
        return "".join(spelling[byte] for byte in token.encode())

    vocab = {spelled(token): token_id for token_id, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=get_merges(said)))
    split = GGUF_PRE_TOKENIZER_SPLITS.get(said.get("pre_tokenizer_type"))
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    backend.pre_tokenizer = by_bytes
    if split is not None:
        each = pre_tokenizers.Split(Regex(split), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([each, by_bytes])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=SPECIAL_OF[kinds[token]])
            for token in tokens
            if kinds.get(token) in SPECIAL_OF
        ]
    )
    return backend
