"""Laws of the options of sampling: one that peers get is taken wherever clients may say it."""

import json
from typing import Any

import pytest

from client.answer.defaults import FOLLOWED, defaults_in
from client.answer.generation import BOUNDS, SAMPLERS, THEIRS, GenerationOptions, Theirs
from client.answer.transformers_arguments import understood, unheeded
from client.gateway.protocols.ollama import OllamaChat, chat_of
from client.gateway.protocols.refused import OPTIONS
from client.gateway.protocols.requests import CompletionRequest, parse_request, request_options

PLAIN = GenerationOptions()
ASKED: dict[str, Any] = {
    name: 3 if isinstance(getattr(PLAIN, name), int | None) else 0.5 for name in BOUNDS
}
"""Each number that peers get, with a value that asks for something."""
SAID = {
    "min_new_tokens": {"min_tokens": 3},
    "prompt_logprobs": {"logprobs": 3, "echo": True},
}
"""Those that OpenAI's interface says otherwise."""


def options_of(kind: type[CompletionRequest] | type[OllamaChat], body: object) -> GenerationOptions:
    request = parse_request(json.dumps(body).encode(), kind)
    asked = chat_of(request) if isinstance(request, OllamaChat) else request
    return request_options(asked, {}, 8)


@pytest.mark.parametrize("name", ASKED)
def test_a_number_that_peers_get_is_taken_by_openais_interface(name: str) -> None:
    value = ASKED[name]
    assert value != getattr(PLAIN, name)
    options = options_of(CompletionRequest, {"prompt": "x", **SAID.get(name, {name: value})})
    assert getattr(options, name) == value
    assert getattr(options.sampling((1,)), name) == value


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_is_taken_by_ollamas_interface(name: str) -> None:
    body = {"model": "m", "messages": [{"role": "user"}], "options": {name: ASKED[name]}}
    assert getattr(options_of(OllamaChat, body), name) == ASKED[name]


def test_what_is_refused_as_not_built_names_every_sampler() -> None:
    assert all(name in OPTIONS["mirostat"] for name in SAMPLERS)


@pytest.mark.parametrize("name", THEIRS)
def test_an_option_of_transformers_is_read_as_transformers_does(name: str) -> None:
    def told(**more: object) -> object:
        given = {name: ASKED[name], **more}
        sizes = {"prompt_tokens": 5, "context_tokens": 64, "vocab": 100}
        return getattr(understood(given, {}, **sizes).options, name)

    assert told(do_sample=True) == ASKED[name]
    greedy = getattr(PLAIN, name) if THEIRS[name] is Theirs.SAMPLER else ASKED[name]
    assert told() == greedy


@pytest.mark.parametrize("name", THEIRS)
def test_a_models_own_file_is_followed_or_said_not_to_be(name: str) -> None:
    own = {name: ASKED[name]}
    followed, said = defaults_in(own).get(name) == ASKED[name], unheeded(own) == own
    assert (followed, said) == (name in FOLLOWED, name not in FOLLOWED)
