"""The bundled model: small, loadable, and able to bring a story to its end."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from models.sample import load, tell
from models.stories import texts
from models.train import BOS, DEFAULT_OUT, Recipe, story_loss, train
from models.train_draft import DRAFT, DraftRecipe, accepted_share
from models.train_draft import train as train_draft
from models.words import HE_NAMES, SHE_NAMES

FRESH_SEED = 987_654
HELD_OUT_BOUND = 0.45


@pytest.fixture(scope="module")
def bundled() -> tuple[Any, Any]:
    """The tokenizer and the model, on one thread."""
    torch.set_num_threads(1)
    return load(DEFAULT_OUT)


def test_the_folder_is_small() -> None:
    size = sum(path.stat().st_size for path in DEFAULT_OUT.rglob("*") if path.is_file())
    assert size <= 12_000_000


def test_there_are_enough_layers_to_share(bundled: tuple[Any, Any]) -> None:
    _, model = bundled
    assert model.config.num_hidden_layers >= 8
    assert model.config.max_position_embeddings >= 1024
    assert len(model.model.layers) == model.config.num_hidden_layers


def test_the_card_and_the_curve_are_beside_the_weights() -> None:
    assert "Apache-2.0" in (DEFAULT_OUT / "README.md").read_text(encoding="utf-8")
    assert (DEFAULT_OUT / "loss.jsonl").read_text(encoding="utf-8").count("\n") > 50


@pytest.mark.parametrize(
    "prompt",
    [
        "Once upon a time",
        "  two  spaces\n\n\ttab ",
        "Zażółć gęślą jaźń",
        "河の話 🦦🚣",
        "a\x00b\u200d",
    ],
)
def test_any_prompt_survives_the_tokenizer(bundled: tuple[Any, Any], prompt: str) -> None:
    tokenizer, _ = bundled
    ids = tokenizer(prompt)["input_ids"]
    assert ids[0] == tokenizer.convert_tokens_to_ids(BOS) == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == prompt


def test_fresh_stories_are_no_surprise(bundled: tuple[Any, Any]) -> None:
    tokenizer, model = bundled
    fresh = list(itertools.islice(texts(FRESH_SEED), 24))
    assert story_loss(model, tokenizer, fresh) < HELD_OUT_BOUND


def test_late_positions_are_no_surprise_either(bundled: tuple[Any, Any]) -> None:
    tokenizer, model = bundled
    ids: list[int] = []
    for text in texts(FRESH_SEED):
        ids += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        if len(ids) >= 1024:
            break
    batch = torch.tensor([ids[:1024]])
    with torch.inference_mode():
        logits = model(input_ids=batch).logits[0, 512:-1]
    loss = torch.nn.functional.cross_entropy(logits, batch[0, 513:])
    assert float(loss) < HELD_OUT_BOUND * 1.25


def test_a_greedy_story_ends_by_itself_and_keeps_its_hero(bundled: tuple[Any, Any]) -> None:
    tokenizer, model = bundled
    limit = 400
    text = tell(tokenizer, model, "Once upon a time", max_new_tokens=limit)
    new_tokens = len(tokenizer(text)["input_ids"]) - len(tokenizer("Once upon a time")["input_ids"])
    assert 40 < new_tokens < limit
    assert text.endswith((".", '"', "!", "?"))
    first = next(name for name in re.findall(r"[A-Z][a-z]+", text) if name in SHE_NAMES + HE_NAMES)
    assert text.count(first) >= 3


def test_two_steps_of_training_are_repeatable(tmp_path: Path) -> None:
    recipe = Recipe(
        steps=2,
        threads=1,
        batch_tokens=256,
        length=128,
        long_length=256,
        tokenizer_stories=300,
        held_out_stories=1,
    )
    first = train(recipe, tmp_path / "first")
    second = train(recipe, tmp_path / "second")
    names = ("model.safetensors", "tokenizer.json", "loss.jsonl")
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    assert first["held_out_loss"] == second["held_out_loss"]


def test_the_drafter_says_mostly_what_the_model_says(bundled: tuple[Any, Any]) -> None:
    from transformers import LlamaForCausalLM

    tokenizer, model = bundled
    drafter = LlamaForCausalLM.from_pretrained(DEFAULT_OUT / DRAFT, dtype=torch.float32)
    assert drafter.config.num_hidden_layers == 2
    fresh = [list(tokenizer(text)["input_ids"]) for text in itertools.islice(texts(FRESH_SEED), 12)]
    assert accepted_share(model, drafter, fresh) > 0.8


def test_two_steps_of_a_drafters_training_are_repeatable(tmp_path: Path) -> None:
    recipe = DraftRecipe(steps=2, length=64, batch_tokens=256, answers=4, held_out_stories=1)
    for name in ("first", "second"):
        train_draft(recipe, DEFAULT_OUT, tmp_path / name)
    first, second = (tmp_path / name / "model.safetensors" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
