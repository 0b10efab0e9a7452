"""A whole model in one process by transformers: tokens/s of many answers to random prompts.

By its continuous batching, and by ``generate`` on all of them together. The first line of figures
that is printed is JSON.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from bench.gpu.engine_gpu import reason
from bench.report import parser_of, provenance, write
from bench.speed.local import prompt_ids

WARMING = 4
"""New tokens of the answers that are not timed."""


def config(new: int) -> GenerationConfig:
    """Exactly ``new`` greedy tokens."""
    return GenerationConfig(
        max_new_tokens=new, min_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )


def measure(
    directory: Path, device: str, dtype: str, prompts: list[list[int]], new: int
) -> dict[str, Any]:
    """Tokens/s from the first prompt's start to the last token, or why there is no figure."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), device_map={"": device}
    ).eval()

    def batching(tokens: int) -> int:
        made = model.generate_batch(prompts, config(tokens), persistent_manager=True)
        return sum(len(each.generated_tokens) for each in made.values())

    def generate(tokens: int) -> int:
        ids = torch.tensor(prompts, device=device)
        mask = torch.ones_like(ids)
        made = model.generate(ids, attention_mask=mask, generation_config=config(tokens))
        return int(made[:, ids.shape[1] :].numel())

    found: dict[str, Any] = {"memory_mib": model.get_memory_footprint() >> 20}
    for name, run in (("generate", generate), ("continuous_batching", batching)):
        try:
            run(WARMING)
            started_s = time.perf_counter()
            tokens = run(new)
            took_s = time.perf_counter() - started_s
        except Exception as error:  # noqa: BLE001 - whatever one way meets, the other is kept
            found[name] = {"failed": reason(error)}
            continue
        short = f"{tokens} of {new * len(prompts)} tokens came"
        whole = tokens == new * len(prompts)
        found[name] = {"tokens_per_s": round(tokens / took_s, 2)} if whole else {"failed": short}
    return found


def main() -> int:
    """Measure a model in a directory, print, and write the result."""
    parser = parser_of("bench.gpu.whole", __doc__)
    parser.add_argument("model", type=Path, help="its directory")
    parser.add_argument("--device", default="cuda:0", help="with its number (cuda:0)")
    parser.add_argument("--dtype", default="bfloat16")
    for name, count in (("answers", 64), ("prompt", 128), ("new", 128)):
        parser.add_argument(f"--{name}", type=int, default=count, metavar="N")
    arguments = parser.parse_args()
    vocab = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
    seeds = range(1, arguments.answers + 1)
    prompts = [prompt_ids(arguments.prompt, vocab, seed) for seed in seeds]
    found = measure(arguments.model, arguments.device, arguments.dtype, prompts, arguments.new)
    print(json.dumps(found), flush=True)
    write(arguments.out, {**provenance(0), **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
