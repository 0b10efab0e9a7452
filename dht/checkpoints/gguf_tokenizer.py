"""A GGUF file's tokenizer: what transformers makes of the metadata, and what it leaves out of them.

llama.cpp names how text is split before its vocabulary (``tokenizer.ggml.pre``), and with the name
come settings that no key states (``src/llama-vocab.cpp``). transformers knows some of the names and
splits as GPT-2 for all others, whose token ids would be others than those of training; those are
refused here, and the name is told.
"""

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


def gguf_tokenizer(file: Path) -> Any:
    """The tokenizer of transformers for the file; raises ValueError where it cannot be the file's
    own, and whatever transformers raises for strange metadata."""
    from tokenizers import decoders, normalizers, pre_tokenizers
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
    backend, more = convert_gguf_tokenizer(architecture, said)
    if by_bytes and splits in DIGIT_BY_DIGIT:
        each = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([each, words])
    if by_bytes and splits in WHOLE_WORDS:
        backend.model.ignore_merges = True
    if not by_bytes and said.get("add_prefix_space") is False:
        backend.normalizer, backend.pre_tokenizer = normalizers.Replace(" ", "▁"), None
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings, **more)
