"""The estimate of an answer's length."""

from coordinator.policies.admission.config import ADMISSION
from coordinator.policies.admission.lengths import AnswerLengths


def test_the_assumed_length_fades_as_answers_end() -> None:
    lengths = AnswerLengths()
    assert lengths.estimate("a") == ADMISSION.answer_tokens
    for client in ("a", "b"):
        for _ in range(400):
            lengths.ended(client, 100)
    assert 100 <= lengths.estimate("a") <= 105


def test_one_client_is_one_voice_and_is_charged_by_its_own_answers() -> None:
    lengths = AnswerLengths()
    for n in range(100):
        lengths.ended(f"client {n}", 200)
    before = lengths.estimate("new")
    for _ in range(10_000):
        lengths.ended("long", 4000)
        lengths.ended("short", 1)
    assert lengths.estimate("long") == 4000
    assert lengths.estimate("short") == lengths.estimate("new")
    assert abs(lengths.estimate("new") - before) <= 0.25 * before


def test_strangers_neither_fill_memory_nor_bring_the_estimate_to_nothing() -> None:
    lengths = AnswerLengths()
    for n in range(3 * ADMISSION.clients_max):
        lengths.ended(f"stranger {n}", 0)
    assert len(lengths.means) == ADMISSION.clients_max
    assert lengths.estimate("a") == ADMISSION.answer_tokens_least
