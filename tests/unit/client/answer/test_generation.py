"""What a caller may ask for, and what is refused in plain words."""

import math
import re
import sys
from dataclasses import replace
from typing import Any

import numpy
import pytest

from client.answer.defaults import defaults_in
from client.answer.generation import GenerationOptions
from client.generate import generation_options, parse
from dht.errors import UserError
from dht.messages.session import SESSION_BOUNDS
from tests.unit.client.gateway.paper import SPEC


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_p": 1.5}, "min_p is 1.5; it must be between 0.0 and 1.0"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be above 0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty is nan"),
        ({"presence_penalty": -3}, "presence_penalty is -3; it must be between -2.0 and 2.0"),
        ({"frequency_penalty": "1"}, "frequency_penalty is '1'; it must be a number"),
        ({"logprobs": 21}, "logprobs is 21; it must be between 0 and 20"),
        ({"prompt_logprobs": True}, "prompt_logprobs is True; it must be a whole number"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens is 9, more than"),
        ({"min_new_tokens": None}, "min_new_tokens is None; it must be a whole number"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias takes numbers by token id"),
        ({"logit_bias": {3: 101}}, "logit_bias of token 3 is 101"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "tokens in logit_bias is 1025"),
        ({"stop_token_ids": "12"}, "it takes token ids"),
        ({"stop_token_ids": 12}, "stop_token_ids is 12; it takes token ids"),
        ({"stop": 5}, "stop is 5; it takes strings"),
        ({"stop_token_ids": range(33)}, "the number of stop_token_ids is 33"),
    ],
)
def test_what_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        GenerationOptions(**options)


@pytest.mark.parametrize(
    ("options", "prompt", "said"),
    [
        ({}, (1, 50), "token id 50 in the prompt is outside the vocabulary of 50"),
        ({}, (-1, 3), "token id -1 in the prompt"),
        ({"logit_bias": {50: 1.0}}, (1,), "token id 50 in logit_bias"),
        ({"stop_token_ids": (4, 77)}, (1,), "token id 77 in stop_token_ids"),
        ({"prompt_logprobs": 20}, (1,) * 50_000, "49932 tokens at most"),
    ],
)
def test_what_the_model_does_not_have(
    options: dict[str, Any], prompt: tuple[int, ...], said: str
) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        GenerationOptions(**options).check_ids(prompt, 50)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"temperature": 0}, 0.0),
        ({"top_p": 1}, 1.0),
        ({"min_p": numpy.float32(0.5)}, 0.5),
        ({"repetition_penalty": numpy.int64(2)}, 2.0),
        ({"top_k": 40.0}, 40),
        ({"seed": numpy.uint64(7)}, 7),
        ({"max_new_tokens": numpy.array(3)}, 3),
        ({"logit_bias": {5: 1}}, {5: 1.0}),
        ({"logit_bias": {numpy.int32(5): numpy.float16(1)}}, {5: 1.0}),
        ({"stop_token_ids": numpy.array([4, 5])}, (4, 5)),
        ({"ignore_eos": numpy.bool_(True)}, True),
    ],
)
def test_numbers_become_those_that_travel(given: dict[str, Any], taken: object) -> None:
    (name,) = given
    found = getattr(GenerationOptions(**given), name)
    assert (found, type(found)) == (taken, type(taken))
    if isinstance(found, dict):
        assert all((type(k), type(v)) == (int, float) for k, v in found.items())


@pytest.mark.parametrize("value", [10**400, -(10**400), math.inf, True, "0"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "seed", "logprobs"])
def test_a_number_out_of_all_bounds_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UserError, match=name):
        GenerationOptions(**{name: value})


def test_a_models_own_sampling_is_taken_in_the_types_that_travel() -> None:
    found = defaults_in({"temperature": 1, "top_k": 50.0, "top_p": 2, "min_p": None})
    assert found == {"temperature": 1.0, "top_k": 50}
    assert (type(found["temperature"]), type(found["top_k"])) == (float, int)


def test_sampling_looks_back_no_further_than_an_open_can_carry() -> None:
    spec = replace(SPEC, context_tokens=1 << 20)
    prompt = (1,) * SESSION_BOUNDS.history_tokens_max
    options = GenerationOptions(presence_penalty=1.0, max_new_tokens=8)
    assert options.request(prompt, spec, ()).history_tokens_max == 8, "only at the answer"
    with pytest.raises(UserError, match="look at 262152 tokens here; 262144 at most"):
        replace(options, repetition_penalty=1.1).request(prompt, spec, ())


def test_stop_tokens_are_the_models_and_the_callers() -> None:
    assert GenerationOptions(stop_token_ids=(9, 2)).sampling((2, 3)).stop_token_ids == (2, 3, 9)
    ignoring = GenerationOptions(stop_token_ids=(9,), ignore_eos=True)
    assert ignoring.sampling((2, 3)).stop_token_ids == (9,)


def test_an_end_that_the_vocabulary_does_not_have_never_comes() -> None:
    spec = replace(SPEC, vocab=10)
    request = GenerationOptions(min_new_tokens=2).request((1, 2), spec, (10, 3, 1 << 20))
    assert request.sampling.stop_token_ids == (3,)
    with pytest.raises(UserError, match="token id 10 in stop_token_ids is outside"):
        GenerationOptions(stop_token_ids=(10,)).request((1, 2), spec, ())


def flags(monkeypatch: pytest.MonkeyPatch, *given: str) -> GenerationOptions:
    needed = ("--initial-peers", "/ip4/1", "--model", "m", "--prompt", "x")
    monkeypatch.setattr(sys, "argv", ["generate", *needed, *given])
    return generation_options(parse())


def test_every_option_has_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "max_new_tokens": 9, "min_new_tokens": 2, "temperature": 0.5, "top_k": 3, "top_p": 0.5,
        "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2, "seed": 4,
        "frequency_penalty": 0.3, "logprobs": 1, "prompt_logprobs": 0,
        "priority": "high", "grammar": "start: 'a'", "prefix_cache": "shared", "cache_salt": "s",
    }  # fmt: skip
    words = [w for name, v in given.items() for w in (f"--{name.replace('_', '-')}", str(v))]
    got = flags(
        monkeypatch, *words, "--logit-bias", "5:-1.5", "--logit-bias", "6:2", "--stop", "a",
        "--stop", "b", "--stop-token-ids", "7", "--ignore-eos", "--no-speculation",
    )  # fmt: skip
    assert got == GenerationOptions(
        **given, logit_bias={5: -1.5, 6: 2.0}, stop=("a", "b"), stop_token_ids=(7,),
        ignore_eos=True, speculate=False,
    )  # fmt: skip
    others = {"logit_bias", "stop", "stop_token_ids", "ignore_eos", "speculate"}
    every = set(GenerationOptions.__dataclass_fields__)
    assert set(given) | others == every, "a new option needs a flag and a line here"
    assert flags(monkeypatch) == GenerationOptions()


@pytest.mark.parametrize("bias", ["5", "5:x", "a:1", "5:1:2"])
def test_a_bias_is_an_id_and_a_number(monkeypatch: pytest.MonkeyPatch, bias: str) -> None:
    with pytest.raises(UserError, match="--logit-bias a token id and a number"):
        flags(monkeypatch, "--logit-bias", bias)


def test_a_top_p_of_0_is_greedy_as_with_most_interfaces() -> None:
    for options in (GenerationOptions(top_p=0, temperature=0.7), GenerationOptions(top_p=0.0)):
        assert options.sampling((1,)).temperature == 0.0
        assert options.sampling((1,)).top_p == 1.0, "peers of all versions take it"
