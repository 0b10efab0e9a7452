"""What a grammar costs per token at the last stage, by size of the vocabulary.

``python -m bench.grammar_masks --out bench/results/grammar_masks.json`` draws answers from random
logits with and without a grammar, over made-up vocabularies of byte strings; tokens of real models
are longer and share more beginnings. One thread of a CPU, whose processor time is told; no model
runs.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from dht.grammars.trial import limits
from dht.messages.session import Sampling
from node.sampling.grammar import GrammarState
from node.sampling.penalties import SamplingRow
from node.sampling.sampler import draw_rows
from node.sampling.token_history import TokenHistory

VOCABULARIES = (32_000, 152_000)
TOKENS = 200
GRAMMARS = {
    "none": "",
    "any JSON object": 'start: %json {"type": "object"}',
    "schema": "start: %json "
    + json.dumps(
        {
            "type": "array",
            "minItems": 100,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 40},
                    "age": {"type": "integer"},
                    "kind": {"enum": ["a", "b", "c"]},
                },
                "required": ["name", "age", "kind"],
                "additionalProperties": False,
            },
        }
    ),
    "expression": "start: /([a-z]{2,8} [0-9]{1,4}\\n)*/",
}


class MadeUp:
    """A tokenizer over random byte strings, shorter ones more often."""

    bos_token_id = None

    def __init__(self, vocab: int) -> None:
        chance = random.Random(0)
        letters = b'etaoin shrdlucmfwypvbgkqjxz"{}[]:,0123456789\nETAOIN_-.\\/'
        known = {bytes((value,)): None for value in range(256)}
        while len(known) < vocab - 1:
            size = min(12, 2 + int(chance.expovariate(0.4)))
            known[bytes(chance.choices(letters, k=size))] = None
        self.tokens = [*known, b"<|end|>"]
        self.eos_token_id = vocab - 1
        self.special_token_ids = [vocab - 1]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def tokens_s(tokenizer: LLTokenizer, vocab: int, grammar: str, temperature: float) -> list[float]:
    """Processor seconds of each draw, the state's own step included."""
    stops = (vocab - 1,)
    sampling = Sampling(
        temperature=temperature, seed=1, stop_token_ids=stops, grammar=grammar.encode()
    )
    history = TokenHistory()
    if grammar:
        matcher = LLMatcher(tokenizer, grammar, limits=limits(), log_level=0)
        history.grammar = GrammarState(matcher, stops)
    rows = torch.randn(16, 1, vocab, generator=torch.Generator().manual_seed(0))
    rows[:, :, vocab - 1] = -100
    taken = []
    for at in range(TOKENS):
        started_s = time.thread_time()
        draw = SamplingRow(sampling=sampling, position=at, history=history)
        (token_id,) = draw_rows(rows[at % 16], [draw])
        history.add(token_id)
        taken.append(time.thread_time() - started_s)
        if token_id in stops:
            break
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for vocab in VOCABULARIES:
        tokenizer = LLTokenizer(TokenizerWrapper(MadeUp(vocab)))
        for name, grammar in GRAMMARS.items():
            for temperature in (0.0, 1.0):
                taken = sorted(tokens_s(tokenizer, vocab, grammar, temperature))
                row = {
                    "vocab": vocab,
                    "grammar": name,
                    "temperature": temperature,
                    "tokens": len(taken),
                    "median_us": round(statistics.median(taken) * 1e6, 1),
                    "p95_us": round(taken[int(0.95 * (len(taken) - 1))] * 1e6, 1),
                    "mean_us": round(sum(taken) / len(taken) * 1e6, 1),
                }
                found.append(row)
                print(row)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"device": "cpu", "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
