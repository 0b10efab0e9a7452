"""What a stage charges for KV that it keeps and that sessions share: as if each was alone."""

from collections.abc import Iterable

import pytest

from coordinator.policies.admission.room import KvAsk
from dht.messages.prefix import NAME_BYTES
from node.kv.block_manager import BlockManager
from node.kv.page_names import NO_NAMES, PageNames
from node.sessions.open_checks import StageView
from node.stage.stage_kv import StageKv
from tests.unit.coordinator.policies.admission.accounts import check_room
from tests.unit.node.kv.accounts import check_pages

PAGES, PAGE_TOKENS = 40, 16


class Accounts:
    """An engine of pages alone, as much of it as a stage's KV needs."""

    kv_tokens = PAGES * PAGE_TOKENS
    page_tokens = PAGE_TOKENS
    state_tokens = 0
    view = StageView(
        fingerprint="f", layers=2, context_tokens=4096, vocab=100, start=0, end=2, serving=True
    )

    def __init__(self) -> None:
        self.pages = BlockManager(PAGES, PAGE_TOKENS, (0, 2))

    def open_kv(
        self,
        key: str,
        tokens: int,
        layers: tuple[int, int],
        likely_tokens: int,
        names: PageNames = NO_NAMES,
    ) -> int:
        found: Iterable[bytes] = names.found(PAGE_TOKENS)
        return self.pages.open(key, tokens, layers, likely_tokens, found) * PAGE_TOKENS

    def extend_kv(self, key: str, tokens: int) -> bool:
        return self.pages.extend(key, tokens)

    def free(self, key: str) -> None:
        self.pages.free(key)

    def leave(self, key: str, names: PageNames, tokens: int) -> None:
        """Write and seal a session's first tokens."""
        self.pages.grow(key, tokens)
        for index in range(tokens // PAGE_TOKENS):
            self.pages.seal(key, index, names.page(index, PAGE_TOKENS) or b"")


def names(tokens: int) -> PageNames:
    blocks = b"".join(bytes([at]) * NAME_BYTES for at in range(tokens // 16))
    return PageNames(space=b"client", blocks=blocks, answers="s", found_most=tokens - 1)


def ask(session: str, tokens: int) -> KvAsk:
    return KvAsk(
        session=session, client="c", start=0, end=2, tokens=tokens, most_tokens=tokens + 16
    )


@pytest.fixture
def stage() -> tuple[Accounts, StageKv]:
    engine = Accounts()
    return engine, StageKv(engine)  # type: ignore[arg-type]


def test_kept_pages_are_free_and_sharers_are_charged_as_if_alone(
    stage: tuple[Accounts, StageKv],
) -> None:
    engine, kv = stage
    kv.room.lengths.means["c"] = (16.0, 1000)
    kv.room.lengths.heard = 100_000
    kv.room.lengths._sum = 16.0
    assert kv.admit(ask("first", 160), 0.0, may_be_urgent=True, names=names(160)) == 0
    assert kv.take("first", 160)
    engine.leave("first", names(160), 160)
    alone = kv.room.charged_of("first")
    kv.free("first")
    assert (kv.room.charged_tokens, kv.room.free_tokens) == (0, engine.kv_tokens)
    assert engine.pages.free_tokens == engine.kv_tokens
    for at, name in enumerate(("second", "third"), start=1):
        assert kv.admit(ask(name, 160), 0.0, may_be_urgent=True, names=names(160)) == 144
        assert kv.room.charged_of(name) == alone
        assert kv.room.held_of(name) == 144
        assert kv.room.charged_tokens == at * alone, "though they hold the same pages"
    check_pages(engine.pages)
    check_room(kv.room)
    assert engine.pages.free_tokens == engine.kv_tokens - 144


def test_what_is_kept_keeps_nobody_out(stage: tuple[Accounts, StageKv]) -> None:
    engine, kv = stage
    whole = engine.kv_tokens - 16
    assert kv.admit(ask("first", whole), 0.0, may_be_urgent=True, names=names(whole)) == 0
    assert kv.take("first", whole)
    engine.leave("first", names(whole), whole)
    kv.free("first")
    assert kv.admit(ask("stranger", whole), 0.0, may_be_urgent=True) == 0
    assert kv.take("stranger", engine.kv_tokens)
    check_pages(engine.pages)


def test_where_others_borrow_the_room_nothing_is_found(stage: tuple[Accounts, StageKv]) -> None:
    """Found pages are held like any: where the accounts have none left, the session waits."""
    engine, kv = stage
    assert kv.admit(ask("first", 160), 0.0, may_be_urgent=True, names=names(160)) == 0
    assert kv.take("first", 160)
    engine.leave("first", names(160), 160)
    kv.free("first")
    kv.room._held = [PAGES - 4] * 2
    assert kv.admit(ask("second", 160), 0.0, may_be_urgent=True, names=names(160)) == 0
    assert engine.pages.get("second") is not None
    check_pages(engine.pages)
