"""Trains the bundled model from nothing on generated stories.

The same options on the same machine with the same number of threads give the same weights::

    python -m models.train --steps 2300 --threads 2
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from models.drills import drills
from models.stories import texts

if TYPE_CHECKING:  # imported late: --help needs no torch
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

BOS, EOS = "<|bos|>", "<|endoftext|>"
DEFAULT_OUT = Path(__file__).parent / "brook"
HELD_OUT_OFFSET = 1_000_000
TOKENIZER_OFFSET = 2_000_000


def cosine(done: float, final_share: float) -> float:
    """Share of the learning rate after the share ``done`` of a cosine from 1 to ``final_share``."""
    return final_share + (1 - final_share) * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class Recipe:
    """All settings that decide the weights."""

    steps: int = 2300
    seed: int = 1
    threads: int = 2
    batch_tokens: int = 2048
    length: int = 256
    long_length: int = 1024
    long_share: float = 0.15
    drill_shares: tuple[tuple[float, float], ...] = ((0.22, 0.5), (0.44, 0.25))
    embedding_std: float = 0.1
    copy_scale: float = 0.1
    learning_rate: float = 2.2e-3
    final_share: float = 0.05
    warmup: int = 100
    decay_share: float = 0.4
    weight_decay: float = 0.1
    clip: float = 1.0
    vocab: int = 2048
    tokenizer_stories: int = 20_000
    held_out_stories: int = 200

    def rate(self, step: int) -> float:
        """Learning rate of a step: warm-up, a plateau, then a cosine down to its end."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        start = self.steps * (1 - self.decay_share)
        if step < start:
            return self.learning_rate
        done = (step - start) / max(1.0, self.steps - start)
        return self.learning_rate * cosine(done, self.final_share)

    def drill_rows(self, step: int, rows: int) -> int:
        """Number of drills in a step's batch of ``rows``; it falls to none."""
        for end, share in self.drill_shares:
            if step < end * self.steps:
                return int(rows * share)
        return 0

    def is_long(self, step: int) -> bool:
        return step >= self.steps * (1 - self.long_share)


def make_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on stories that the model is not trained on."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    sample = itertools.islice(texts(recipe.seed + TOKENIZER_OFFSET), recipe.tokenizer_stories)
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> LlamaForCausalLM:
    """Return an untrained model of the bundled shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=recipe.vocab,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def initialize(model: LlamaForCausalLM, recipe: Recipe) -> None:
    """Draw the weights so that every attention head starts as a weak copier.

    Names are copied from the text before, and a model this small, on batches this small, takes very
    long to find out how. The output matrix of each head therefore starts as the scaled transpose of
    its value matrix, whose rows are orthonormal: from the first step on, what a head attends to
    becomes a little more likely as output.
    """
    import torch

    config = model.config
    depth_scale = (2 * config.num_hidden_layers) ** -0.5
    for name, weight in model.named_parameters():
        if weight.ndim < 2:
            continue
        std = recipe.embedding_std if "embed" in name else weight.shape[1] ** -0.5
        torch.nn.init.normal_(weight, std=std * (depth_scale if "down_proj" in name else 1.0))
    per_value = config.num_attention_heads // config.num_key_value_heads
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            torch.nn.init.orthogonal_(attention.v_proj.weight)
            values = attention.v_proj.weight.view(
                config.num_key_value_heads, -1, config.hidden_size
            )
            spread = values.repeat_interleave(per_value, dim=0).reshape(-1, config.hidden_size)
            attention.o_proj.weight.copy_(recipe.copy_scale * spread.T)


def token_stream(tokenizer: PreTrainedTokenizerFast, lines: Iterator[str]) -> Iterator[int]:
    """Yield the tokens of the texts, each from bos to eos."""
    eos = tokenizer.eos_token_id
    for text in lines:
        yield from tokenizer(text)["input_ids"]
        yield eos


class Batches:
    """Cuts the streams of stories and drills into batches."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
        self.recipe = recipe
        self.stories = token_stream(tokenizer, texts(recipe.seed))
        self.drills = token_stream(tokenizer, drills(recipe.seed))

    def batch(self, step: int) -> torch.Tensor:
        """Return the token ids of a step; call it once for each step, in order."""
        import torch

        recipe = self.recipe
        length = recipe.long_length if recipe.is_long(step) else recipe.length
        rows = recipe.batch_tokens // length
        drill_tokens = recipe.drill_rows(step, rows) * length
        ids = list(itertools.islice(self.stories, rows * length - drill_tokens))
        ids += itertools.islice(self.drills, drill_tokens)
        return torch.tensor(ids).view(rows, length)


def story_loss(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    stories: list[str],
) -> float:
    """Return the mean loss per token over whole stories, each on its own."""
    import torch

    total, count = 0.0, 0
    with torch.inference_mode():
        for text in stories:
            ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
            size = ids.shape[1] - 1
            total += float(model(input_ids=ids, labels=ids).loss) * size
            count += size
    return total / count


def tokens_per_story(tokenizer: PreTrainedTokenizerFast, stories: list[str]) -> float:
    """Return the mean number of tokens of a story with its bos and eos."""
    return sum(len(tokenizer(text)["input_ids"]) + 1 for text in stories) / len(stories)


def make_optimizer(model: LlamaForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    """Return AdamW that decays matrices and leaves norms alone."""
    import torch

    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=recipe.learning_rate,
        betas=(0.9, 0.95),
    )


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the model in half precision, with its tokenizer and generation settings."""
    from transformers import GenerationConfig, LlamaForCausalLM

    half = LlamaForCausalLM(model.config).half()
    half.load_state_dict(model.state_dict())
    half.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        max_new_tokens=400,
    )
    half.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(out)
    settings = out / "tokenizer_config.json"
    content = json.loads(settings.read_text(encoding="utf-8"))
    content["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def descend(
    model: LlamaForCausalLM,
    optimizer: torch.optim.AdamW,
    loss: torch.Tensor,
    rate: float,
    clip: float,
) -> None:
    """One step down the gradient of ``loss``, its norm clipped, at a learning rate."""
    import torch

    for group in optimizer.param_groups:
        group["lr"] = rate
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def train(recipe: Recipe, out: Path, save_every: int = 200) -> dict[str, object]:
    """Train by the recipe, write everything under ``out`` and return the summary."""
    import torch

    started = time.monotonic()
    torch.set_num_threads(recipe.threads)
    torch.manual_seed(recipe.seed)
    torch.use_deterministic_algorithms(True)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(recipe)
    model = make_model(tokenizer, recipe)
    initialize(model, recipe)
    optimizer = make_optimizer(model, recipe)
    batches = Batches(tokenizer, recipe)
    held_out = list(itertools.islice(texts(recipe.seed + HELD_OUT_OFFSET), recipe.held_out_stories))
    save(model, tokenizer, out)
    recent: list[float] = []
    curve: list[dict[str, float]] = []
    for step in range(recipe.steps):
        ids = batches.batch(step)
        loss = model(input_ids=ids, labels=ids).loss
        descend(model, optimizer, loss, recipe.rate(step), recipe.clip)
        recent = [*recent[-49:], loss.item()]
        done = step + 1
        if done % 20 == 0 or done == recipe.steps:
            point = {"step": done, "loss": round(sum(recent[-20:]) / len(recent[-20:]), 4)}
            if done % save_every == 0 or done == recipe.steps:
                point["held_out_loss"] = round(story_loss(model, tokenizer, held_out[:50]), 4)
                save(model, tokenizer, out)
            curve.append(point)
            print(json.dumps({**point, "seconds": round(time.monotonic() - started)}), flush=True)
    lines = "".join(json.dumps(point) + "\n" for point in curve)
    (out / "loss.jsonl").write_text(lines, encoding="utf-8")
    save(model, tokenizer, out)
    summary: dict[str, object] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": recipe.steps * recipe.batch_tokens,
        "tokens_per_story": round(tokens_per_story(tokenizer, held_out), 1),
        "train_loss": round(sum(recent) / len(recent), 4),
        "held_out_loss": round(story_loss(model, tokenizer, held_out), 4),
        "seconds": round(time.monotonic() - started),
        "recipe": asdict(recipe),
    }
    (out / "training.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def main() -> None:
    """Train the bundled model."""
    defaults = Recipe()
    parser = argparse.ArgumentParser(
        prog="python -m models.train",
        description=main.__doc__,
        epilog="example: python -m models.train --steps 200 --out /tmp/brook",
    )
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--threads", type=int, default=defaults.threads)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--smoke", action="store_true", help="two steps into a temporary folder")
    args = parser.parse_args()
    if args.smoke:
        recipe = Recipe(
            steps=2,
            seed=args.seed,
            threads=args.threads,
            tokenizer_stories=500,
            held_out_stories=2,
        )
        with tempfile.TemporaryDirectory() as folder:
            summary = train(recipe, Path(folder))
    else:
        summary = train(Recipe(args.steps, args.seed, args.threads), args.out)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
