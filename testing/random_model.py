"""Llama models of a given shape with random weights, for measuring speed."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def make_llama(
    directory: Path,
    *,
    hidden: int,
    layers: int,
    vocab: int = 8192,
    context_tokens: int = 2048,
    seed: int = 0,
) -> Path:
    """Write a Llama with heads of width 64, 4 query heads per KV head and a SwiGLU of 8/3.

    There is no tokenizer and no end-of-text token. Returns ``directory``.
    """
    torch.manual_seed(seed)
    heads = hidden // 64
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=(hidden * 8 // 3 + 63) // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        vocab_size=vocab,
        max_position_embeddings=context_tokens,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory
