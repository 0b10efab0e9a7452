"""Laws of the page accounts under any order of reservations and releases."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from node.kv.block_manager import BlockManager, Layers
from tests.examples import examples
from tests.unit.node.kv.accounts import check_pages

PAGES, PAGE_TOKENS, LAYERS = 12, 4, (0, 2)
sessions = st.sampled_from("abcdef")


spans = st.sampled_from([(0, 2), (0, 1), (1, 2)])
words = st.lists(st.integers(0, 1), max_size=6).map(bytes)
"""A session's text, one word for each page: few texts, which begin alike."""


class Accounts(RuleBasedStateMachine):
    """Sessions open over some layers, find pages, grow, write, seal, go back and end.

    ``cells`` is the memory itself: what each page of each layer was last written with. A session
    must always read its own text there, whoever wrote it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.accounts = BlockManager(PAGES, PAGE_TOKENS, LAYERS)
        self.texts: dict[str, bytes] = {}
        self.cells: dict[tuple[int, int], bytes] = {}

    def name_of(self, session: str, index: int) -> bytes:
        """All words up to a page's end; beyond the text, words that no other session has."""
        text = self.texts[session] + session.encode() * PAGES
        return text[: index + 1]

    @rule(
        session=sessions, text=words, tokens=st.integers(1, 40), span=spans, share=st.floats(0, 1)
    )
    def open(self, session: str, text: bytes, tokens: int, span: Layers, share: float) -> None:
        if session in self.texts:
            with pytest.raises(ValueError, match=session):
                self.accounts.open(session, tokens, span)
            return
        names = [text[: at + 1] for at in range(len(text))]
        found = self.accounts.open(session, tokens, span, int(share * tokens), names)
        self.texts[session] = text
        got = self.accounts.get(session)
        assert got is not None
        assert found == len(got.pages) <= min(len(text), -(-tokens // PAGE_TOKENS))
        assert got.written == found * PAGE_TOKENS

    @rule(session=sessions, tokens=st.integers(1, 40))
    def extend(self, session: str, tokens: int) -> None:
        got = self.accounts.get(session)
        if got is None or tokens > got.tokens:
            return
        had, needed = got.page_count, max(got.page_count, -(-tokens // PAGE_TOKENS))
        free = self.free_pages(got.span)
        assert self.accounts.extend(session, tokens) is (needed - had <= free)
        assert got.page_count == (needed if needed - had <= free else had)

    def free_pages(self, span: Layers) -> int:
        """Pages that no session holds on any layer of ``span``."""
        held = {
            page
            for each in map(self.accounts.get, self.texts)
            if each is not None and each.span[0] < span[1] and span[0] < each.span[1]
            for page in (*each.pages, *each.given)
        }
        return PAGES - len(held)

    @rule(session=sessions, pages=st.integers(1, 5), seals=st.booleans())
    def write(self, session: str, pages: int, seals: bool) -> None:
        """Run whole pages, as far as the session was given some."""
        got = self.accounts.get(session)
        if got is None:
            return
        first = got.written // PAGE_TOKENS
        end = min(first + pages, self.accounts.given_tokens(session) // PAGE_TOKENS)
        if end <= first:
            return
        self.accounts.grow(session, end * PAGE_TOKENS)
        for index in range(first, end):
            for layer in range(*got.span):
                self.cells[layer, got.pages[index]] = self.name_of(session, index)
        got.written = end * PAGE_TOKENS
        for index in range(end if seals else 0):
            self.accounts.seal(session, index, self.name_of(session, index))

    @rule(session=sessions, share=st.floats(0, 1), text=words)
    def go_back(self, session: str, share: float, text: bytes) -> None:
        """Write again from some page on, and something else."""
        got = self.accounts.get(session)
        if got is None:
            return
        page = int(share * (got.written // PAGE_TOKENS))
        try:
            assert self.accounts.rewind(session, page * PAGE_TOKENS) is None
        except ValueError:
            self.free(session)  # no page was free for its own
            return
        self.texts[session] = self.texts[session][:page].ljust(page, session.encode()) + text

    @rule(session=sessions)
    def free(self, session: str) -> None:
        self.accounts.free(session)
        self.texts.pop(session, None)
        assert self.accounts.get(session) is None

    @invariant()
    def each_reads_its_own_text(self) -> None:
        check_pages(self.accounts)
        assert self.accounts.free_tokens == self.free_pages(LAYERS) * PAGE_TOKENS
        for session in self.texts:
            got = self.accounts.get(session)
            assert got is not None
            assert not got.run or list(got.pages) == list(
                range(got.pages[0], got.pages[0] + len(got.pages)) if got.pages else []
            )
            for index in range(got.written // PAGE_TOKENS):
                for layer in range(*got.span):
                    assert self.cells[layer, got.pages[index]] == self.name_of(session, index)


TestAccounts = Accounts.TestCase
TestAccounts.settings = examples(150, stateful_step_count=20)


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
    assert accounts.open("t", 1, names=[b"old"]) == 0
    assert accounts.open("u", 1, names=[b"new"]) == 1
    check_pages(accounts)


def test_a_shared_page_is_never_written_and_its_rows_come_along() -> None:
    accounts = BlockManager(4, 4)
    for name, names in (("a", []), ("b", [b"0", b"01"])):
        found = accounts.open(name, 12, names=names)
        assert accounts.extend(name, 8 if found else 12)
        accounts.grow(name, 8)
        if name == "a":
            for index, word in enumerate((b"0", b"01")):
                accounts.seal("a", index, word)
    assert found == 2
    assert accounts.rewind("a", 12) is None
    got = accounts.get("a")
    assert got is not None
    old = got.pages[1]
    assert accounts.rewind("a", 6) == (old, got.pages[1])
    assert old in accounts.get("b").pages  # type: ignore[union-attr]
    check_pages(accounts)
    with pytest.raises(ValueError, match="no page is free"):
        accounts.rewind("b", 1)
    accounts.free("a")
    assert accounts.rewind("b", 1) is None, "held by b alone it is written again"
    check_pages(accounts)


def test_pages_are_found_by_sessions_over_the_very_same_layers() -> None:
    accounts = BlockManager(4, 1, (0, 4))
    accounts.open("a", 2, (0, 4))
    accounts.extend("a", 1)
    accounts.grow("a", 1)
    accounts.seal("a", 0, b"0")
    for at, span in enumerate([(0, 2), (2, 4), (1, 4)]):
        assert accounts.open(f"other {at}", 1, span, names=[b"0"]) == 0
    assert accounts.open("same", 1, (0, 4), names=[b"0"]) == 1


def test_sessions_on_disjoint_layers_have_the_same_pages_and_others_have_not() -> None:
    accounts = BlockManager(4, 4, (2, 6))
    for name, span in (("low", (2, 4)), ("high", (4, 6)), ("across", (3, 5))):
        accounts.open(name, 16, span)
    assert accounts.extend("low", 12)
    assert accounts.extend("high", 12)
    assert accounts.free_tokens == 4
    assert not accounts.extend("across", 8), "nothing is given where not all is there"
    assert accounts.extend("across", 4)
    check_pages(accounts)
    for name in ("low", "high", "across"):
        accounts.grow(name, accounts.given_tokens(name))
    pages = {name: set(accounts.get(name).pages) for name in ("low", "high", "across")}  # type: ignore[union-attr]
    assert pages["low"] == pages["high"]
    assert not pages["across"] & pages["low"]
    accounts.free("low")
    assert accounts.extend("high", 16) is False, "the last page is taken on one of its layers"
    accounts.free("across")
    assert accounts.extend("high", 16)
    check_pages(accounts)


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
