"""A tiny EAGLE-3 head as such heads are published, and what it drafts, in plain torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from testing.tiny_families import VOCAB, make

LAYERS = 8
FEATURES = (2, 4, 5)
"""In front of these layers of a model of eight."""
HEADS, KV_HEADS, EPSILON, THETA = 4, 2, 1e-6, 5e2
KNOWN = 80
"""Tokens that a head knows."""


def write_head(
    directory: Path, target: Path, *, width: int | None = None, right: bool = False, **said: Any
) -> Path:
    """A head for the model in ``target``, with random weights.

    ``width``: its own, with an embedding of its own. ``right``: its first drafts are what mostly
    comes in :func:`foretold_target`. ``said`` is added to its configuration.
    """
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(11)
    theirs = load_file(target / "model.safetensors")
    embedding = theirs["model.embed_tokens.weight"].float()
    hidden = embedding.shape[1]
    own, inner, head = width or hidden, 48, (width or hidden) // HEADS

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    known = torch.randperm(VOCAB, generator=generator)[:KNOWN].sort().values
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[known] = True
    tensors = {
        "fc.weight": drawn(own, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": drawn(HEADS * head, 2 * own),
        "midlayer.self_attn.k_proj.weight": drawn(KV_HEADS * head, 2 * own),
        "midlayer.self_attn.v_proj.weight": drawn(KV_HEADS * head, 2 * own),
        "midlayer.self_attn.o_proj.weight": drawn(own, HEADS * head),
        "midlayer.mlp.gate_proj.weight": drawn(inner, own),
        "midlayer.mlp.up_proj.weight": drawn(inner, own),
        "midlayer.mlp.down_proj.weight": drawn(own, inner),
        "midlayer.input_layernorm.weight": 1 + drawn(own),
        "midlayer.hidden_norm.weight": 1 + drawn(own),
        "midlayer.post_attention_layernorm.weight": 1 + drawn(own),
        "norm.weight": 1 + drawn(own),
        "lm_head.weight": 3 * drawn(KNOWN, own),
        "d2t": known - torch.arange(KNOWN),
        "t2d": mask,
    }
    if width is not None:
        tensors["embed_tokens.weight"] = drawn(VOCAB, width)
    if right:
        for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
            tensors[name] = torch.zeros_like(tensors[name])
        tensors["fc.weight"] = torch.eye(hidden).repeat(1, 3) / 3
        tensors["norm.weight"] = torch.ones(own)
        tensors["lm_head.weight"] = embedding.roll(14, dims=0)[known].contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": own,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,
        "max_position_embeddings": 64,
        "vocab_size": VOCAB,
        "draft_vocab_size": KNOWN,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **({} if width is None else {"target_hidden_size": hidden}),
        **said,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def foretold_target(directory: Path, name: str = "llama", **more: Any) -> Path:
    """A model whose next token mostly follows from the newest one: the seventh after it."""
    make(directory, name, num_hidden_layers=LAYERS, initializer_range=0.05, **more)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] += 1.5 * tensors["model.embed_tokens.weight"].roll(7, dims=0)
    tensors["model.embed_tokens.weight"] *= 3
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


def _norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + EPSILON) * weight


def _turned(rows: torch.Tensor) -> torch.Tensor:
    """Rotary positions on ``[heads, rows, width]``, from 0 on."""
    width = rows.shape[-1]
    speeds = THETA ** (-torch.arange(0, width, 2) / width)
    angles = (torch.arange(rows.shape[1])[:, None] * speeds).repeat(1, 2)
    one, two = rows.chunk(2, dim=-1)
    return rows * angles.cos() + torch.cat([-two, one], dim=-1) * angles.sin()


@dataclass
class Reference:
    """A model in transformers and its head in plain torch; nothing is kept between calls."""

    target: Path
    head: Path
    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self.target, dtype=torch.float32).eval()
        self.tensors = load_file(self.head / "model.safetensors")
        theirs = self.model.get_input_embeddings().weight.detach()
        self.embedding = self.tensors.get("embed_tokens.weight", theirs)

    def features(self, ids: Sequence[int]) -> torch.Tensor:
        """What the head takes of the tokens ``ids``, ``[tokens, 3 × width]``."""
        with torch.inference_mode():
            out = self.model(torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False)
        return torch.cat([out.hidden_states[layer][0] for layer in FEATURES], dim=-1)

    def drafts(
        self, ids: Sequence[int], count: int, features: torch.Tensor | None = None
    ) -> list[int]:
        """``count`` tokens behind ``ids``; ``features``: of all but the last, or of the last of
        these, where the head knows nothing of those before."""
        given = self.features(ids[:-1]) if features is None else features
        following = list(ids[len(ids) - len(given) :])
        hidden, drawn = given @ self.tensors["fc.weight"].T, []
        for _ in range(count):
            out = self._layer(self.embedding[torch.tensor(following)], hidden)[-1:]
            last = _norm(out, self.tensors["norm.weight"]) @ self.tensors["lm_head.weight"].T
            token = int(last.argmax())
            drawn.append(token + int(self.tensors["d2t"][token]))
            following.append(drawn[-1])
            hidden = torch.cat([hidden, out])
        return drawn

    def _layer(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        part = {
            name.removeprefix("midlayer."): weight
            for name, weight in self.tensors.items()
            if name.startswith("midlayer.")
        }
        normed = _norm(hidden, part["hidden_norm.weight"])
        joined = torch.cat([_norm(embedded, part["input_layernorm.weight"]), normed], dim=-1)

        def by_head(name: str, heads: int) -> torch.Tensor:
            rows = joined @ part[f"self_attn.{name}_proj.weight"].T
            return rows.view(len(rows), heads, -1).transpose(0, 1)

        q, k = _turned(by_head("q", HEADS)), _turned(by_head("k", KV_HEADS))
        k, v = (
            each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (k, by_head("v", KV_HEADS))
        )
        attended = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True
        )
        attended = attended[0].transpose(0, 1).flatten(1) @ part["self_attn.o_proj.weight"].T
        out = (normed if self.norm_before_residual else hidden) + attended
        rows = _norm(out, part["post_attention_layernorm.weight"])
        gate = functional.silu(rows @ part["mlp.gate_proj.weight"].T)
        made: torch.Tensor = gate * (rows @ part["mlp.up_proj.weight"].T)
        return out + made @ part["mlp.down_proj.weight"].T
