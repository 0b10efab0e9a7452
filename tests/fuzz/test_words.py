"""Single words of strangers: addresses, peer ids, grants, findings of a dial-back, HTTP bodies."""

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given

from client.answer.defaults import defaults_in
from client.gateway.errors import ApiError
from client.gateway.protocols.requests import (
    ChatRequest,
    CompletionRequest,
    check_supported,
    parse_request,
    prompts_of,
    request_options,
    wanted_tokens,
)
from dht.identity.grant import grant, grant_refusal, is_own_word
from dht.identity.multiaddr import (
    checked_tcp,
    circuits_of,
    dialled_of,
    host_of,
    split,
    split_circuit,
)
from dht.identity.peer_id import is_peer_id, verify
from dht.messages.codec import MalformedError
from dht.messages.logprobs import unpack_scores
from dht.messages.peer import ReachAnswer
from dht.messages.session import SessionLeaving, SessionOpen
from node.links.dial_back_findings import Findings
from tests.choices import Choices, choices
from tests.fuzz.laws import lawful
from tests.fuzz.test_files import json_of
from tests.fuzz.values import PEOPLE, damaged_bytes, value_of

pytestmark = pytest.mark.property
ALICE, BOB = PEOPLE[0].peer_id, PEOPLE[1].peer_id
ADDRESSES = (
    f"/ip4/1.2.3.4/tcp/5/p2p/{ALICE}",
    f"/ip6/::1/tcp/5/p2p/{BOB}/p2p-circuit/p2p/{ALICE}",
    f"/dns4/example.org/tcp/65535/p2p/{ALICE}",
    ALICE,
    "2600::1%eth0/tcp/1",
)
NOW_S = 1_700_000_000.0


@given(choices(80))
def test_an_address_is_parsed_or_no_address(drawn: Choices) -> None:
    sent = drawn.one_of(ADDRESSES).encode()
    text = (damaged_bytes(sent, drawn) if drawn.yes() else sent).decode(errors="replace")

    def parse() -> None:
        for dialled in dialled_of(ALICE, (text,) * 20):
            assert checked_tcp(dialled) == dialled
        for circuit in circuits_of(ALICE, (text,) * 20):
            found = split_circuit(circuit)
            assert found is not None
            assert is_peer_id(found[0])
        assert "/" not in host_of(text)
        verify(text, b"", bytes(64))
        with contextlib.suppress(ValueError):
            assert is_peer_id(split(text)[0])

    lawful(parse, ())


@given(choices(200))
def test_what_a_dial_back_found_is_an_address_of_ours_or_nothing(drawn: Choices) -> None:
    """The host that others name gets into this peer's own announcement."""
    findings = Findings()
    for each in PEOPLE:
        said = drawn.one_of(("8.8.8.8", "2600::1", "10.0.0.1", "2600::1%<b>\n"))
        host = damaged_bytes(said.encode(), drawn) if drawn.yes() else said.encode()
        answer = ReachAnswer(reached=drawn.yes() or None, host=host.decode(errors="replace")[:128])
        findings.note(each.peer_id, answer, 0.0)
    findings.conclude(0.0, relayed=drawn.yes())
    assert "/" not in findings.host
    assert "%" not in findings.host


@given(choices(300))
def test_a_grant_counts_for_what_was_signed_alone(drawn: Choices) -> None:
    asked: SessionOpen = replace(value_of(SessionOpen, drawn), client=ALICE)
    signed = grant(asked, PEOPLE[0].sign, NOW_S)
    assert grant_refusal(signed, NOW_S) is None
    other: SessionOpen = value_of(SessionOpen, drawn)
    names = [name for name in SessionOpen.__slots__ if name not in {"hop", "rows_logged"}]
    field = drawn.one_of(names)
    changed = replace(signed, **{field: getattr(other, field)})
    if changed != signed:
        assert lawful(lambda: grant_refusal(changed, NOW_S), ()) is not None
    lawful(lambda: is_own_word(value_of(SessionLeaving, drawn)), ())


@given(choices(60))
def test_scores_are_log_probabilities_or_malformed(drawn: Choices) -> None:
    body = bytes(drawn.below(256) for _ in range(drawn.one_of((0, 4, 12, 24, 40))))
    ids = tuple(range(drawn.below(4)))
    scores = lawful(lambda: unpack_scores(body, ids, drawn.below(3), 1000), MalformedError)
    assert scores is None or all(each.logprob <= 0.0 for each in scores)


BODIES = {
    ChatRequest: {
        "model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": ["x"], "seed": 1, "logit_bias": {"5": 1},
        "logprobs": True, "top_logprobs": 3, "max_completion_tokens": 5, "stream": True,
    },
    CompletionRequest: {
        "model": "m", "prompt": [[1, 2], [3]], "max_tokens": 5, "logprobs": 2, "echo": True,
        "stream_options": {"include_usage": True}, "min_tokens": 1, "stop_token_ids": [1],
        "repetition_penalty": 1.1, "presence_penalty": 0.1, "top_k": -1, "min_p": 0.1,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", BODIES)
@given(drawn=choices(120))
def test_a_body_is_a_request_or_names_its_fault(
    kind: type[ChatRequest] | type[CompletionRequest], drawn: Choices
) -> None:
    body = json_of(BODIES[kind], drawn)
    refused: list[ApiError] = []

    def understand() -> None:
        try:
            request = parse_request(body, kind)
            check_supported(request)
            if isinstance(request, CompletionRequest):
                prompts_of(request)
            request_options(request, defaults_in({}), wanted_tokens(request))
        except ApiError as error:
            refused.append(error)

    lawful(understand, ())
    assert all(each.status == 400 for each in refused)
    assert all(len(each.message) < 1 << 14 for each in refused)
