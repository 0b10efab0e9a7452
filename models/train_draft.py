"""Trains the drafter of the bundled model: two layers that say what its eight would say.

It begins with the big model's embedding, its first and its last layer, and learns the big model's
distributions (Kullback-Leibler divergence) over stories of the generator and over answers of the
big model itself, greedy and sampled. The same options on the same machine with the same number of
threads give the same weights. Further runs go on from what is there, on other stories::

    python -m models.train_draft
    python -m models.train_draft --go-on --seed 12
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.stories import texts
from models.train import DEFAULT_OUT, Recipe, cosine, descend, make_optimizer, token_stream

if TYPE_CHECKING:  # imported late: --help needs no torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

DRAFT = "draft"
HELD_OUT_OFFSET = 5_000_000
PROMPTS_OFFSET = 6_000_000


@dataclass(frozen=True)
class DraftRecipe:
    """All settings that decide the drafter's weights."""

    steps: int = 120
    seed: int = 11
    threads: int = 1
    batch_tokens: int = 1024
    length: int = 256
    answers_share: float = 0.25
    """Share of rows that are the big model's own answers."""
    answers: int = 64
    """Answers asked of the big model; they come again and again."""
    prompt_tokens: int = 8
    temperatures: tuple[float, ...] = (0.0, 0.8)
    layers: tuple[int, ...] = (0, -1)
    """Layers of the big model that the drafter begins with."""
    learning_rate: float = 2e-3
    final_share: float = 0.03
    warmup: int = 20
    clip: float = 1.0
    held_out_stories: int = 32

    def rate(self, step: int) -> float:
        """Learning rate of a step: warm-up, then a cosine down to its end."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * cosine(done, self.final_share)


def make_student(teacher: LlamaForCausalLM, layers: tuple[int, ...]) -> LlamaForCausalLM:
    """Return a model of some of the teacher's ``layers`` between its embedding and its head."""
    from transformers import LlamaForCausalLM

    config = type(teacher.config)(**{**teacher.config.to_dict(), "num_hidden_layers": len(layers)})
    student = LlamaForCausalLM(config)
    student.model.embed_tokens.load_state_dict(teacher.model.embed_tokens.state_dict())
    student.model.norm.load_state_dict(teacher.model.norm.state_dict())
    for own, index in zip(student.model.layers, layers, strict=True):
        own.load_state_dict(teacher.model.layers[index].state_dict())
    return student


def answers(
    teacher: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: DraftRecipe
) -> Iterator[list[int]]:
    """Yield beginnings of stories with the big model's answers, ``recipe.length`` tokens each,
    without end."""
    import torch

    stories = texts(recipe.seed + PROMPTS_OFFSET)
    rows: list[list[int]] = []
    for temperature in recipe.temperatures:
        count = recipe.answers // len(recipe.temperatures)
        told = itertools.islice(stories, count)
        ids = torch.tensor([tokenizer(text)["input_ids"][: recipe.prompt_tokens] for text in told])
        sampled = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
        with torch.inference_mode():
            out = teacher.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=recipe.length - recipe.prompt_tokens,
                eos_token_id=None,
                pad_token_id=0,
                **(sampled if temperature else {"do_sample": False}),
            )
        rows += out.tolist()
    torch.manual_seed(recipe.seed)
    while True:
        for index in torch.randperm(len(rows)).tolist():
            yield rows[index]


def accepted_share(
    teacher: LlamaForCausalLM, student: LlamaForCausalLM, rows: list[list[int]]
) -> float:
    """Share of positions at which both models have the same likeliest token."""
    import torch

    same = total = 0
    with torch.inference_mode():
        for row in rows:
            ids = torch.tensor([row])
            big, small = (model(input_ids=ids).logits.argmax(-1) for model in (teacher, student))
            same += int((big == small).sum())
            total += ids.numel()
    return same / total


def save(student: LlamaForCausalLM, out: Path) -> None:
    """Write the drafter in half precision; it reads the big model's tokens."""
    from transformers import LlamaForCausalLM

    half = LlamaForCausalLM(student.config).half()
    half.load_state_dict(student.state_dict())
    half.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    (out / "generation_config.json").unlink(missing_ok=True)


def train(
    recipe: DraftRecipe, model: Path, out: Path, *, goes_on: bool = False
) -> dict[str, object]:
    """Train by the recipe, write everything under ``out`` and return the summary."""
    import torch
    from torch.nn.functional import kl_div
    from transformers import AutoTokenizer, LlamaForCausalLM

    started = time.monotonic()
    torch.set_num_threads(recipe.threads)
    torch.manual_seed(recipe.seed)
    torch.use_deterministic_algorithms(True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    teacher = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    teacher.requires_grad_(False)
    held_out_stream = token_stream(tokenizer, texts(recipe.seed + HELD_OUT_OFFSET))
    held_out = [
        list(itertools.islice(held_out_stream, recipe.length))
        for _ in range(recipe.held_out_stories)
    ]
    student = make_student(teacher, recipe.layers)
    if goes_on:
        student.load_state_dict(LlamaForCausalLM.from_pretrained(out).float().state_dict())
    rows = recipe.batch_tokens // recipe.length
    of_answers = round(recipe.answers_share * rows)
    stories = token_stream(tokenizer, texts(recipe.seed))
    told_before = answers(teacher, tokenizer, recipe)
    optimizer = make_optimizer(student, Recipe(learning_rate=recipe.learning_rate))
    recent: list[float] = []
    for step in range(recipe.steps):
        told = list(itertools.islice(told_before, of_answers))
        told += [list(itertools.islice(stories, recipe.length)) for _ in range(rows - of_answers)]
        ids = torch.tensor(told)
        with torch.no_grad():
            wanted = teacher(input_ids=ids).logits.log_softmax(-1)
        said = student(input_ids=ids).logits.log_softmax(-1)
        loss: Any = kl_div(said, wanted, log_target=True, reduction="none").sum(-1).mean()
        descend(student, optimizer, loss, recipe.rate(step), recipe.clip)
        recent = [*recent[-19:], loss.item()]
        if (step + 1) % 20 == 0:
            point = {"step": step + 1, "divergence": round(sum(recent) / len(recent), 4)}
            print(json.dumps({**point, "seconds": round(time.monotonic() - started)}), flush=True)
            save(student, out)
    save(student, out)
    summary: dict[str, object] = {
        "parameters": sum(p.numel() for p in student.parameters()),
        "divergence": round(sum(recent) / len(recent), 4),
        "same_likeliest_token": round(accepted_share(teacher, student, held_out), 4),
        "seconds": round(time.monotonic() - started),
        "recipe": asdict(recipe),
    }
    (out / "training.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def main() -> None:
    """Train the bundled model's drafter."""
    defaults = DraftRecipe()
    parser = argparse.ArgumentParser(
        prog="python -m models.train_draft",
        description=main.__doc__,
        epilog="example: python -m models.train_draft --steps 100 --out /tmp/draft",
    )
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--threads", type=int, default=defaults.threads)
    parser.add_argument("--model", type=Path, default=DEFAULT_OUT, help="whose drafter it is")
    parser.add_argument("--out", type=Path, help="where to write it (draft/ in the model's)")
    parser.add_argument("--go-on", action="store_true", help="begin with the weights in --out")
    parser.add_argument("--smoke", action="store_true", help="two steps into a temporary folder")
    args = parser.parse_args()
    if args.smoke:
        recipe = DraftRecipe(
            steps=2,
            seed=args.seed,
            threads=args.threads,
            length=64,
            batch_tokens=256,
            answers=4,
            held_out_stories=2,
        )
        with tempfile.TemporaryDirectory() as folder:
            summary = train(recipe, args.model, Path(folder))
    else:
        recipe = DraftRecipe(steps=args.steps, seed=args.seed, threads=args.threads)
        out = args.out or args.model / DRAFT
        summary = train(recipe, args.model, out, goes_on=args.go_on)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
