"""The same model in one process, for comparison: ``transformers`` itself, in float32."""

import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

transformers_logging.disable_progress_bar()


@cache
def memory_for(model: Path, dtype: str = "float32") -> int:
    """Bytes that a peer would have to lend to hold the whole model with its least KV room."""
    from dht.messages.types import kv_tokens_least, stage_bytes
    from node.model.layer_range import ModelLayout
    from node.weights.store import WeightStore

    spec = ModelLayout.of(WeightStore.open(str(model)), dtype).spec(model.name)
    return stage_bytes(spec, 0, spec.layers, kv_tokens_least(spec))


def draft_memory_for(model: Path) -> int:
    """Bytes that the draft model takes which lies beside ``model``; 0 without one."""
    from node.drafting.config import drafter_bytes
    from node.model.layer_range import ModelLayout
    from node.stage.draft_engine import found_beside
    from node.weights.store import WeightStore

    if (found := found_beside(str(model))) is None:
        return 0
    return drafter_bytes(ModelLayout.of(WeightStore.open(found), "float32").spec(found))


class Reference:
    """``transformers`` with the model's weights as float32 on the CPU."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, directory: Path, *, threads: int | None = None) -> "Reference":
        """Load a Hugging Face directory."""
        if threads is not None:
            torch.set_num_threads(threads)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        has_tokenizer = (directory / "tokenizer.json").is_file()
        return cls(model, AutoTokenizer.from_pretrained(directory) if has_tokenizer else None)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, special tokens included."""
        return list(self._tokenizer(text).input_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, without special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def greedy(
        self, prompt_ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = False
    ) -> tuple[list[int], float]:
        """New ids of ``generate`` without sampling, and the seconds that it took."""
        ids = torch.tensor([list(prompt_ids)])
        options = {"eos_token_id": None, "pad_token_id": 0} if ignore_eos else {}
        started_s = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                **options,
            )
        return out[0, len(prompt_ids) :].tolist(), time.perf_counter() - started_s

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits ``[vocab]`` after ``ids``."""
        with torch.inference_mode():
            return self.model(torch.tensor([list(ids)])).logits[0, -1]
