"""Lets the bundled model tell stories, and writes them into its model card.

::

    python -m models.sample "Once upon a time" --temperature 0.8 --seed 3
    python -m models.sample --card
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from models.train import DEFAULT_OUT, Recipe

PROMPT = "Once upon a time"
CARD_SAMPLES: tuple[tuple[str, float, int], ...] = (
    (PROMPT, 0.0, 0),
    ("One rainy morning,", 0.0, 0),
    (PROMPT, 0.8, 1),
    (PROMPT, 0.8, 2),
    ("Once there was an otter", 0.8, 3),
    ("One windy morning, Hazel", 0.8, 4),
)

CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# Brook

A very small Llama-architecture language model that tells short stories about a river and the
people and animals who live on it. It exists so that a first run of Anabranch has something to
say without downloading a model: it is {size:.1f} MB on disk and has {layers} layers, enough to
split between several machines. It knows nothing outside its stories. Any prompt is continued as
a story, and prompts far from its stories give nonsense.

Its sentences are correct more often than its stories are: it follows a plot and keeps the hero's
name, but it often gives two characters the same name (nearly always when decoding greedily),
and it forgets which thing was lost, lent or traded.

| | |
|---|---|
| Parameters | {parameters:,} (embeddings tied) |
| Shape | {layers} layers, hidden {hidden}, MLP {mlp}, {heads} heads, {kv_heads} KV heads |
| Context | {context} tokens |
| Vocabulary | {vocab} byte-level BPE tokens: any text encodes and decodes without loss |
| Weights | float16 on disk, meant to be run in float32 |
| License | Apache-2.0 |

## Training

The text is written by the seeded generator in `models/stories.py`; nothing comes from anywhere
else. In the first part of the training some of each batch is drills from `models/drills.py`,
short texts that are all about who is who, so that the model learns early that names come from
the text before. Every attention head starts as a weak copier for the same reason: its output
matrix is drawn as the scaled transpose of its value matrix. Stories are generated as training
goes, so none is seen twice. The held-out stories come from another seed of the same generator,
so the held-out loss says how well the model has learned the generator, not how well it writes
English.

| | |
|---|---|
| Stories | {story_tokens:,} tokens, about {stories:,} stories, generator seed {seed} |
| Drills | {drill_tokens:,} tokens, in the first {drill_percent:.0f}% of the steps |
| Steps | {steps}, {batch_tokens} tokens each |
| Sequences | {length} tokens; {long_length} tokens in the last {long_percent:.0f}% of the steps |
| Optimizer | AdamW, betas 0.9 and 0.95, weight decay {weight_decay}, gradient clip {clip} |
| Learning rate | {learning_rate}, {warmup} steps of warm-up, constant, cosine down to \
{final_percent:.0f}% over the last {decay_percent:.0f}% |
| Final training loss | {train_loss} (mean of the last 50 steps) |
| Held-out loss | {held_out_loss} per token ({held_out_stories} stories) |
| Wall time | {minutes:.0f} minutes on {threads} CPU threads |

```
python -m models.train --steps {steps} --seed {seed} --threads {threads}
```

Everything is seeded and deterministic algorithms are on; a unit test trains two steps twice and
compares the weights byte for byte. The loss curve is in `loss.jsonl`,
the numbers above are in `training.json`.

## Samples

Written by `python -m models.sample --card`, in float32, without any choosing.

{samples}
"""


def load(folder: Path) -> tuple[Any, Any]:
    """Return the tokenizer and the float32 model in a folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return tokenizer, model.eval()


def tell(
    tokenizer: Any,
    model: Any,
    prompt: str,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    max_new_tokens: int = 400,
) -> str:
    """Continue the prompt until the story ends; temperature 0 is greedy."""
    import torch

    torch.manual_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt")
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
    with torch.inference_mode():
        output = model.generate(
            inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            **sampling,
        )
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


def card_samples(tokenizer: Any, model: Any) -> str:
    """Return the samples of the model card as Markdown."""
    parts = []
    for prompt, temperature, seed in CARD_SAMPLES:
        how = f"temperature {temperature}, seed {seed}" if temperature else "greedy"
        text = tell(tokenizer, model, prompt, temperature=temperature, seed=seed)
        parts.append(f"**{prompt}** ({how})\n\n> {text}")
    return "\n\n".join(parts)


def story_tokens(recipe: Recipe) -> int:
    """Return the number of training tokens that belong to stories."""
    total = 0
    for step in range(recipe.steps):
        length = recipe.long_length if recipe.is_long(step) else recipe.length
        rows = recipe.batch_tokens // length
        total += (rows - recipe.drill_rows(step, rows)) * length
    return total


def card(folder: Path) -> str:
    summary = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    recipe = summary["recipe"]
    of_stories = story_tokens(Recipe(**recipe))
    tokenizer, model = load(folder)
    config = model.config
    size = (folder / "model.safetensors").stat().st_size
    return CARD.format(
        **{**recipe, **{key: value for key, value in summary.items() if key != "recipe"}},
        size=size / 1e6,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        mlp=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        context=config.max_position_embeddings,
        story_tokens=of_stories,
        drill_tokens=summary["tokens"] - of_stories,
        drill_percent=100 * recipe["drill_shares"][-1][0],
        stories=round(of_stories / summary["tokens_per_story"]),
        long_percent=100 * recipe["long_share"],
        final_percent=100 * recipe["final_share"],
        decay_percent=100 * recipe["decay_share"],
        minutes=summary["seconds"] / 60,
        samples=card_samples(tokenizer, model),
    )


def main() -> None:
    """Tell a story, or write the model card."""
    parser = argparse.ArgumentParser(
        prog="python -m models.sample",
        description=main.__doc__,
        epilog='example: python -m models.sample "A small otter" --temperature 0.7 --seed 3',
    )
    parser.add_argument("prompt", nargs="?", default=PROMPT)
    parser.add_argument("--model", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-new-tokens", type=int, default=400)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--card", action="store_true", help="write README.md next to the weights")
    args = parser.parse_args()
    import torch  # imported late: --help needs no torch

    torch.set_num_threads(args.threads)
    if args.card:
        (args.model / "README.md").write_text(card(args.model), encoding="utf-8")
        return
    tokenizer, model = load(args.model)
    story = tell(
        tokenizer,
        model,
        args.prompt,
        temperature=args.temperature,
        seed=args.seed,
        max_new_tokens=args.max_new_tokens,
    )
    print(story)


if __name__ == "__main__":
    main()
