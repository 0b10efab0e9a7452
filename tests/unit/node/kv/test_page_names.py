"""Who finds whose pages: same client and names, or a shared prompt over the same stages."""

import itertools
from dataclasses import replace

import pytest

from dht.messages.prefix import (
    BLOCK_TOKENS,
    NAME_BYTES,
    SHARED_KEY,
    answer_name,
    block_name,
    block_names,
)
from dht.messages.session import Sampling, SessionOpen
from dht.messages.types import RouteStage
from node.kv.page_names import NO_NAMES, PageNames

IDS = tuple(range(100))
ROUTE = tuple(RouteStage(peer_id=f"peer {at}", start=at, end=at + 1) for at in range(3))
OPEN = SessionOpen(
    session="s" * 32,
    attempt=0,
    client="client",
    fingerprint="f",
    route=ROUTE,
    hop=1,
    prompt_tokens=len(IDS),
    max_new_tokens=8,
    sampling=Sampling(),
    blocks=b"".join(block_names(b"key", IDS)),
)
SHARED = replace(OPEN, shares_prefix=True, blocks=b"".join(block_names(SHARED_KEY, IDS)))


def test_names_cover_all_tokens_before_and_go_on_from_any_block() -> None:
    names = block_names(b"key", IDS)
    assert len(names) == len(IDS) // BLOCK_TOKENS
    assert {len(name) for name in names} == {NAME_BYTES}
    assert block_names(b"key", IDS[32:], names[1]) == names[2:]
    other = block_names(b"key", (1, *IDS[1:]))
    assert not set(other) & set(names)
    assert not set(block_names(b"another key", IDS)) & set(names)
    assert [block_name(OPEN.blocks, at) for at in range(7)] == [*names, b""]


@pytest.mark.parametrize("page_tokens", [1, 4, 16, 24, 64])
def test_pages_of_any_size_have_names_of_their_own_within_the_prompt(page_tokens: int) -> None:
    names = PageNames.of(OPEN)
    found = list(names.found(page_tokens))
    assert len(found) == len(set(found)) == (len(IDS) - 1) // page_tokens
    assert found == [names.page(at, page_tokens) for at in range(len(found))]


def test_one_row_of_the_prompt_always_runs() -> None:
    whole = replace(OPEN, prompt_tokens=96)
    assert len(list(PageNames.of(whole).found(16))) == 5
    scored = replace(OPEN, sampling=Sampling(prompt_logprobs=0))
    assert list(PageNames.of(scored).found(16)) == []
    assert PageNames.of(scored).page(0, 16) is not None, "it leaves its pages to others"


def test_nobody_finds_pages_of_another_client_key_session_or_way() -> None:
    """The same claim of names at the same stage finds other pages for each of these."""
    opens = {
        "mine": OPEN,
        "another client, who guessed the names": replace(OPEN, client="other"),
        "another salt": replace(OPEN, blocks=b"".join(block_names(b"salt", IDS))),
        "shared": SHARED,
        "shared over another first stage": replace(
            SHARED, route=(replace(ROUTE[0], peer_id="strange"), *ROUTE[1:])
        ),
        "shared over other layers before": replace(
            SHARED, route=(replace(ROUTE[0], end=2), *ROUTE[1:])
        ),
        "shared, as the first stage": replace(SHARED, hop=0),
    }
    found = {who: set(PageNames.of(each).found(16)) for who, each in opens.items()}
    assert all(found.values())
    for one, other in itertools.combinations(found, 2):
        assert not found[one] & found[other], (one, other)
    later = replace(SHARED, client="other", route=(*ROUTE[:2], replace(ROUTE[2], peer_id="new")))
    assert set(PageNames.of(later).found(16)) == found["shared"], "what comes after changes nothing"


def test_answers_are_kept_under_their_session_and_never_shared() -> None:
    mine = PageNames.of(OPEN).page(6, 16)
    assert mine is not None
    assert answer_name(OPEN.session, 6) in mine
    assert PageNames.of(replace(OPEN, session="t" * 32)).page(6, 16) != mine
    assert PageNames.of(SHARED).page(6, 16) is None
    assert PageNames.of(SHARED).page(5, 16) is not None


def test_a_later_attempt_shares_nothing() -> None:
    """Its rows may be from the log of a stage whose own upstream was another then."""
    assert PageNames.of(replace(SHARED, attempt=1)) == NO_NAMES
    assert PageNames.of(replace(OPEN, attempt=1)) == PageNames.of(OPEN)


def test_a_new_stage_of_a_move_finds_nothing_and_shares_nothing() -> None:
    """Its KV is a copy from a peer that the client names."""
    moved = replace(OPEN, migrate_until=1)
    assert list(PageNames.of(moved).found(16)) == []
    assert PageNames.of(moved).page(0, 16) is not None
    assert PageNames.of(replace(SHARED, migrate_until=1)) == NO_NAMES
    assert PageNames.of(replace(OPEN, blocks=b"")) == NO_NAMES
