"""What transformers people pass is understood as transformers does, or refused by name."""

import pytest
from transformers import GenerationConfig

from client.answer.transformers_arguments import (
    KNOWN,
    padded,
    understood,
    unheeded,
    unpadded,
)
from client.text.conversation import Conversation, fitted
from dht.errors import UserError

SIZES = {"prompt_tokens": 5, "context_tokens": 64, "vocab": 100}


def call(prompt_tokens: int = 10, context_tokens: int = 512, **named: object):  # type: ignore[no-untyped-def]
    return understood(
        named,
        {"eos_token_id": [2]},
        prompt_tokens=prompt_tokens,
        context_tokens=context_tokens,
        vocab=100,
    )


def test_lengths_are_counted_as_transformers_counts_them() -> None:
    assert call(max_new_tokens=7).options.max_new_tokens == 7
    assert call(max_length=64).options.max_new_tokens == 54
    assert call(max_new_tokens=3, max_length=64).options.max_new_tokens == 3
    assert call().options.max_new_tokens == 20
    assert call(prompt_tokens=505).options.max_new_tokens == 7
    with pytest.raises(UserError, match="max_length is 10"):
        call(max_length=10)


def test_sampling_is_on_with_do_sample_alone() -> None:
    greedy = call(temperature=0.7, top_p=0.9, top_k=5).options
    assert (greedy.temperature, greedy.top_p, greedy.top_k) == (0.0, 1.0, 0)
    sampled = call(do_sample=True, top_p=0.9, seed=3).options
    assert (sampled.temperature, sampled.top_p, sampled.top_k, sampled.seed) == (1.0, 0.9, 50, 3)


def test_ends_and_padding() -> None:
    assert call().options.stop_token_ids == (2,)
    assert call().pad_token_id == 2
    changed = call(eos_token_id=[5, 6], pad_token_id=0)
    assert (changed.options.stop_token_ids, changed.pad_token_id) == ((5, 6), 0)
    assert call(eos_token_id=None).options.stop_token_ids == ()


def test_an_end_that_no_vocabulary_has_never_comes() -> None:
    beyond = call(eos_token_id=[100, 7, -1])
    assert (beyond.options.stop_token_ids, beyond.pad_token_id) == ((7,), 100)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 4),
        ("num_return_sequences", 2),
        ("penalty_alpha", 0.6),
        ("no_repeat_ngram_size", 3),
        ("logits_processor", [object()]),
        ("stopping_criteria", [object()]),
        ("inputs_embeds", object()),
        ("max_newtokens", 3),
    ],
)
def test_what_a_swarm_cannot_do_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UserError, match=name):
        call(**{name: value})
    assert call(**{name: None}).options.max_new_tokens == 20


def test_a_generation_config_is_taken_with_all_that_it_sets() -> None:
    config = GenerationConfig(max_new_tokens=9, do_sample=True, temperature=0.5, num_beams=1)
    options = call(**config.to_diff_dict()).options
    assert (options.max_new_tokens, options.temperature) == (9, 0.5)
    assert call(**GenerationConfig().to_diff_dict()).options.max_new_tokens == 20
    with pytest.raises(UserError, match="num_beams"):
        call(**GenerationConfig(num_beams=3).to_diff_dict())


def test_every_argument_of_transformers_is_known() -> None:
    """So that none of a model's own file is taken for one that means nothing."""
    assert set(vars(GenerationConfig())) <= KNOWN


def test_a_models_own_file_may_say_what_changes_no_answer() -> None:
    own = {
        "cache_implementation": "hybrid",
        "use_cache": False,
        "chat_format": "chatml",
        "suppress_tokens": [],
        "top_k": 64,
    }
    assert understood({}, own, **SIZES).options.max_new_tokens == 20
    with pytest.raises(UserError, match="chat_format"):
        call(chat_format="chatml")
    for name, value in (("suppress_tokens", [1]), ("max_length", "9")):
        with pytest.raises(UserError, match=name):
            understood({}, {name: value}, **SIZES)


def test_what_answers_do_not_follow_of_a_models_own_file_is_known() -> None:
    own = {"temperature": 0.6, "eos_token_id": [2], "suppress_tokens": [], "min_length": 0}
    assert unheeded(own) == {}
    asked = {"bad_words_ids": [[3]], "min_new_tokens": 4, "no_repeat_ngram_size": 3}
    assert unheeded({**own, **asked}) == asked


def test_padding_comes_off_the_left_and_goes_on_the_right() -> None:
    assert unpadded([[0, 0, 5, 6], [1, 2, 3, 4]], [[0, 0, 1, 1], [1, 1, 1, 1]]) == (
        (5, 6),
        (1, 2, 3, 4),
    )
    for mask in ([[1, 1, 0]], [[1, 0, 1]], [[0, 0, 0]], [[1, 1]], []):
        with pytest.raises(UserError, match="attention_mask"):
            unpadded([[5, 6, 7]], mask)
    assert padded([[1, 2, 3], [4]], 9) == [[1, 2, 3], [4, 9, 9]]
    with pytest.raises(UserError, match="pad_token_id"):
        padded([[1, 2], [3]], None)


def test_a_long_conversation_forgets_its_oldest_exchanges_not_its_instructions() -> None:
    talk = Conversation().with_system("S")
    for number in range(5):
        talk = talk.said("user", f"question {number}").said("assistant", "answer")
    talk = talk.said("user", "last")

    def encode(turns):  # type: ignore[no-untyped-def]
        assert turns[0].role == "system"
        assert turns[1].role == "user", "the first that is kept is a question"
        return tuple(ord(char) for turn in turns for char in turn.text)

    prompt, left_out = fitted(talk, encode, 45)
    assert bytes(prompt).decode() == "Squestion 3answerquestion 4answerlast"
    assert left_out == 6
    with pytest.raises(UserError, match="5 tokens with its surroundings"):
        fitted(talk, encode, 4)
    assert talk.with_system("").turns[0].role == "user"
