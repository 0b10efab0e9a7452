"""Laws of the page accounts under any order of reservations and releases."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from node.kv_accounts import KvAccounts

PAGES, PAGE_TOKENS = 12, 4
sessions = st.sampled_from("abcdef")


class Accounts(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.accounts = KvAccounts(PAGES, PAGE_TOKENS)
        self.held: dict[str, int] = {}

    @rule(session=sessions, tokens=st.integers(1, PAGES * PAGE_TOKENS + 5))
    def reserve(self, session: str, tokens: int) -> None:
        if session in self.held:
            with pytest.raises(ValueError, match=session):
                self.accounts.reserve(session, tokens)
            return
        free = self.accounts.free_tokens
        refusal = self.accounts.reserve(session, tokens)
        if tokens > free:
            assert refusal == f"{tokens} tokens of KV asked, {free} are free"
            assert self.accounts.get(session) is None
            return
        assert refusal is None
        self.held[session] = tokens
        got = self.accounts.get(session)
        assert got is not None
        assert (got.tokens, len(got.pages)) == (tokens, -(-tokens // PAGE_TOKENS))
        assert all(0 <= page < PAGES for page in got.pages)
        first = got.pages[0]
        assert got.run <= (got.pages == tuple(range(first, first + len(got.pages))))

    @rule(session=sessions)
    def free(self, session: str) -> None:
        self.accounts.free(session)
        self.held.pop(session, None)
        assert self.accounts.get(session) is None

    @invariant()
    def no_page_is_held_twice_and_none_is_lost(self) -> None:
        self.accounts.check()
        reservations = [self.accounts.get(session) for session in self.held]
        pages = [page for got in reservations if got is not None for page in got.pages]
        assert len(pages) == len(set(pages))
        assert self.accounts.free_tokens + len(pages) * PAGE_TOKENS == PAGES * PAGE_TOKENS


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_run_is_preferred_and_scattered_pages_are_used_where_there_is_none() -> None:
    accounts = KvAccounts(6, 4)
    for name in "abcdef":
        assert accounts.reserve(name, 4) is None
    for name in "ace":
        accounts.free(name)
    assert accounts.reserve("scattered", 9) is None
    got = accounts.get("scattered")
    assert got is not None
    assert (got.pages, got.run) == ((0, 2, 4), False)
    accounts.free("scattered")
    accounts.free("b")
    assert accounts.reserve("run", 12) is None
    got = accounts.get("run")
    assert got is not None
    assert (got.pages, got.run) == ((0, 1, 2), True)


def test_no_pages_refuse_everything() -> None:
    assert KvAccounts(0, 16).reserve("s", 1) == "1 tokens of KV asked, 0 are free"
