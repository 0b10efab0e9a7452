"""Laws of the page accounts under any order of reservations and releases."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from node.kv.block_manager import BlockManager
from tests.examples import examples

PAGES, PAGE_TOKENS = 12, 4
sessions = st.sampled_from("abcdef")


class Accounts(RuleBasedStateMachine):
    """Sessions open, grow, seal, adopt and end; export only reads, import grows like decoding."""

    def __init__(self) -> None:
        super().__init__()
        self.accounts = BlockManager(PAGES, PAGE_TOKENS)
        self.held: dict[str, int] = {}
        self.names: dict[str, list[bytes]] = {}

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
        self.names[session] = []
        got = self.accounts.get(session)
        assert got is not None
        assert (got.tokens, list(got.pages)) == (tokens, [])

    @rule(session=sessions, share=st.floats(0, 1.2))
    def grow(self, session: str, share: float) -> None:
        got = self.accounts.get(session)
        if got is None:
            with pytest.raises(KeyError):
                self.accounts.grow(session, 1)
            return
        given = self.accounts.given_tokens(session)
        tokens = int(share * given)
        if tokens > given:
            with pytest.raises(ValueError, match="reserved"):
                self.accounts.grow(session, tokens)
            return
        before = list(got.pages)
        self.accounts.grow(session, tokens)  # what was promised is never refused
        assert list(got.pages[: len(before)]) == before
        assert len(got.pages) == max(len(before), -(-tokens // PAGE_TOKENS))
        assert all(0 <= page < PAGES for page in got.pages)
        first = got.pages[0] if got.pages else 0
        assert got.run == (list(got.pages) == list(range(first, first + len(got.pages))))

    @rule(session=sessions, word=st.binary(min_size=1, max_size=1))
    def seal(self, session: str, word: bytes) -> None:
        """The next page that has no name gets that of its predecessor and one of few words."""
        got = self.accounts.get(session)
        if got is not None and len(self.names[session]) < len(got.pages):
            names = self.names[session]
            names.append((names[-1] if names else b"") + bytes([word[0] % 2]))
            self.accounts.seal(session, len(names) - 1, names[-1])

    @rule(session=sessions, words=st.lists(st.integers(0, 1), max_size=4))
    def adopt(self, session: str, words: list[int]) -> None:
        got = self.accounts.get(session)
        if got is None or got.pages:
            return
        names = [bytes(words[: n + 1]) for n in range(len(words))]
        given = len(got.given)
        adopted = self.accounts.adopt(session, names)
        assert len(got.pages) == adopted <= min(given, len(names))
        self.names[session] = names[:adopted]

    @rule(session=sessions, tokens=st.integers(1, 20), share=st.floats(0, 1))
    def open(self, session: str, tokens: int, share: float) -> None:
        """Open one that takes its pages one after another."""
        if session not in self.held:
            self.accounts.open(session, tokens, likely_tokens=int(share * tokens))
            self.held[session] = tokens
            self.names[session] = []

    @rule(session=sessions, tokens=st.integers(1, 20))
    def extend(self, session: str, tokens: int) -> None:
        got = self.accounts.get(session)
        if got is None or tokens > got.tokens:
            return
        free, had = self.accounts.free_tokens // PAGE_TOKENS, got.page_count
        needed = max(had, -(-tokens // PAGE_TOKENS))
        assert self.accounts.extend(session, tokens) is (needed - had <= free)
        assert got.page_count == (needed if needed - had <= free else had)

    @rule(session=sessions)
    def free(self, session: str) -> None:
        self.accounts.free(session)
        self.held.pop(session, None)
        assert self.accounts.get(session) is None

    @invariant()
    def no_page_is_held_by_two_and_none_is_lost(self) -> None:
        self.accounts.check()
        owners: dict[int, set[tuple[int, bytes]]] = {}
        for session in self.held:
            got = self.accounts.get(session)
            assert got is not None
            for index, page in enumerate(got.pages):
                names = self.names[session]
                name = names[index] if index < len(names) else session.encode() + b"?"
                owners.setdefault(page, set()).add((index, name))
        # Who holds the same page holds it for the same content.
        assert all(len(contents) == 1 for contents in owners.values())
        given = sum(len(self.accounts.get(s).given) for s in self.held)  # type: ignore[union-attr]
        assert self.accounts.free_tokens == (PAGES - given - len(owners)) * PAGE_TOKENS


TestAccounts = Accounts.TestCase
TestAccounts.settings = examples(80, stateful_step_count=40)


def test_a_run_is_preferred_and_scattered_pages_are_used_where_there_is_none() -> None:
    accounts = BlockManager(6, 4)
    for name in "abcdef":
        assert accounts.reserve(name, 4) is None
        accounts.grow(name, 4)
    for name in "ace":
        accounts.free(name)
    assert accounts.reserve("scattered", 9) is None
    accounts.grow("scattered", 9)
    got = accounts.get("scattered")
    assert got is not None
    assert (list(got.pages), got.run) == ([0, 2, 4], False)
    accounts.free("scattered")
    accounts.free("b")
    assert accounts.reserve("run", 12) is None
    got = accounts.get("run")
    assert got is not None
    for tokens in (1, 5, 12):  # page by page
        accounts.grow("run", tokens)
    assert (list(got.pages), got.run) == ([0, 1, 2], True)


def test_sessions_that_grow_in_turn_keep_their_runs() -> None:
    accounts = BlockManager(8, 1)
    for name in "ab":
        assert accounts.reserve(name, 4) is None
    for tokens in range(1, 5):
        for name in "ab":
            accounts.grow(name, tokens)
    assert [accounts.get(name).run for name in "ab"] == [True, True]  # type: ignore[union-attr]


def test_kept_pages_go_when_the_room_is_needed_the_longest_unused_first() -> None:
    accounts = BlockManager(3, 1)
    for name in ("old", "new"):
        accounts.reserve(name, 1)
        accounts.grow(name, 1)
        accounts.seal(name, 0, name.encode())
        accounts.free(name)
    assert accounts.free_tokens == 3
    accounts.reserve("s", 2)
    accounts.grow("s", 2)
    accounts.free("s")
    accounts.reserve("t", 1)
    assert accounts.adopt("t", [b"old"]) == 0
    assert accounts.adopt("t", [b"new"]) == 1
    accounts.check()


def test_sessions_on_disjoint_layers_have_the_same_pages_and_others_have_not() -> None:
    accounts = BlockManager(4, 4, (2, 6))
    for name, span in (("low", (2, 4)), ("high", (4, 6)), ("across", (3, 5))):
        accounts.open(name, 16, span)
    assert accounts.extend("low", 12)
    assert accounts.extend("high", 12)
    assert accounts.free_tokens == 4
    assert not accounts.extend("across", 8), "nothing is given where not all is there"
    assert accounts.extend("across", 4)
    accounts.check()
    for name in ("low", "high", "across"):
        accounts.grow(name, accounts.given_tokens(name))
    pages = {name: set(accounts.get(name).pages) for name in ("low", "high", "across")}  # type: ignore[union-attr]
    assert pages["low"] == pages["high"]
    assert not pages["across"] & pages["low"]
    accounts.free("low")
    assert accounts.extend("high", 16) is False, "the last page is taken on one of its layers"
    accounts.free("across")
    assert accounts.extend("high", 16)
    accounts.check()


def test_a_session_grows_along_its_run_where_nobody_claims_it() -> None:
    accounts = BlockManager(8, 1)
    accounts.open("a", 8, likely_tokens=3)
    accounts.open("b", 8, likely_tokens=3)
    for tokens in range(1, 4):
        for name in "ab":
            assert accounts.extend(name, tokens)
    assert accounts.extend("b", 5)
    assert not accounts.extend("a", 4)
    accounts.free("b")
    assert accounts.extend("a", 8)
    accounts.grow("a", 8)
    assert accounts.get("a").run  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="9 tokens asked, 8 reserved"):
        accounts.extend("a", 9)


def test_no_pages_refuse_everything() -> None:
    assert BlockManager(0, 16).reserve("s", 1) == "1 tokens of KV asked, 0 are free"
