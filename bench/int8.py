"""What int8 rows between stages do to answers, beside float16 rows, on the bundled model.

    python -m bench.int8 [--out bench/results/int8.json]

Hidden states after layers 3 and 6 (three stages) pass through the wire's own packing, for prompts
alone or for every row; everything else is float32. Against the unchanged model: the error of the
logits, how many greedy answers agree and up to where, and the loss over the same text.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import results_links
from bench.local_swarm import ROOT
from bench.report import provenance, write
from models.stories import texts
from node.links.wire_rows import INT8, join_rows, quantized, split_rows

MODEL = ROOT / "models" / "brook"
BOUNDARIES = (2, 5)
"""Layers behind which another stage would go on."""
SEED = 20_261_121
"""Seed of stories that the model was not trained on."""
PROMPTS = 64
PROMPT_TOKENS = 48
NEW_TOKENS = 64

Change = Callable[[torch.Tensor], torch.Tensor]


def int8(rows: torch.Tensor) -> torch.Tensor:
    """Rows as the next stage sees them."""
    flat = rows.reshape(-1, rows.shape[-1])
    body = quantized(join_rows([flat]), "float32", flat.shape[1])
    back = split_rows(body, INT8, flat.shape[1], [flat.shape[0]], "float32")[0]
    return back.reshape(rows.shape)


def float16(rows: torch.Tensor) -> torch.Tensor:
    return rows.half().float()


WIRES: dict[str, tuple[Change, bool]] = {
    "float16": (float16, True),
    "int8 prefill": (int8, False),
    "int8 all": (int8, True),
}
"""Name: the change, and whether decode rows are changed, too."""


class Wire:
    """Hooks on the boundaries of a model."""

    def __init__(self, model: Any) -> None:
        self.change: Change | None = None
        self.decodes = True
        for index in BOUNDARIES:
            model.model.layers[index].register_forward_hook(self._hook)

    def _hook(self, _module: Any, _inputs: Any, output: Any) -> Any:
        if self.change is None:
            return output
        rows = output[0] if isinstance(output, tuple) else output
        if rows.shape[1] == 1 and not self.decodes:
            return output
        changed = self.change(rows)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed


def measure() -> dict[str, Any]:
    """Every wire against none."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    wire = Wire(model)
    fresh = itertools.islice(texts(SEED), PROMPTS)
    ids = [tokenizer(text, return_tensors="pt").input_ids[:, :512] for text in fresh]

    def run() -> tuple[list[torch.Tensor], list[list[int]], float]:
        logits, answers, losses = [], [], []
        for row in ids:
            out = model(row, labels=row)
            logits.append(out.logits[0])
            losses.append(float(out.loss))
            prompt = row[:, :PROMPT_TOKENS]
            answer = model.generate(
                prompt, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
            )
            answers.append(answer[0, prompt.shape[1] :].tolist())
        return logits, answers, statistics.fmean(losses)

    found: dict[str, Any] = {}
    with torch.inference_mode():
        base_logits, base_answers, base_loss = run()
        for name, (change, decodes) in WIRES.items():
            wire.change, wire.decodes = change, decodes
            logits, answers, loss = run()
            wire.change = None
            errors = [(a - b).abs() for a, b in zip(logits, base_logits, strict=True)]
            top = [
                (a.argmax(-1) == b.argmax(-1)).float().mean().item()
                for a, b in zip(logits, base_logits, strict=True)
            ]
            same = [a == b for a, b in zip(answers, base_answers, strict=True)]
            found[name] = {
                "logit_error_mean": statistics.fmean(float(e.mean()) for e in errors),
                "logit_error_max": max(float(e.max()) for e in errors),
                "top_token_agrees": statistics.fmean(top),
                "greedy_answers_equal": sum(same) / len(same),
                "loss": loss,
                "loss_change": loss - base_loss,
            }
    spread = statistics.fmean(float(one.std()) for one in base_logits)
    return {"logit_spread": spread, "loss": base_loss, "prompts": PROMPTS, "wires": found}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.int8", description="What int8 rows between stages do to answers."
    )
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    arguments = parser.parse_args()
    result = measure()
    print(results_links.int8(result))
    if arguments.out:
        write(arguments.out, {**result, "provenance": provenance(seed=SEED)})


if __name__ == "__main__":
    main()
