"""What a client remembers of the blocks of its prompts and answers."""

from hypothesis import given
from hypothesis import strategies as st

from client.view.prefixes import PrefixMemory
from dht.messages.prefix import BLOCK_TOKENS, BLOCKS_MAX, answer_name
from dht.messages.types import RouteStage

ROUTE = (RouteStage(peer_id="a", start=0, end=8),)
OTHER = (RouteStage(peer_id="b", start=0, end=8),)
PROMPT = tuple(range(40))
ANSWERED = (*PROMPT, *range(1000, 1040))


def test_the_next_turn_names_the_answer_after_its_session() -> None:
    memory = PrefixMemory(b"secret")
    first = memory.named(PROMPT, "")
    assert (first.route, first.known_tokens, len(first.names)) == ((), 0, 2)
    assert first.names == first.digests
    memory.remember(first, ANSWERED, "session", ROUTE)
    turn = memory.named((*ANSWERED, 1, 2, 3), "")
    assert (turn.route, turn.known_tokens) == (ROUTE, 80)
    assert turn.names == (*first.names, *(answer_name("session", at) for at in range(2, 5)))
    assert turn.digests[:2] == first.digests
    other = memory.named((*PROMPT, *range(2000, 2040)), "")
    assert (other.route, other.known_tokens) == (ROUTE, 32)
    assert other.names[2:] == other.digests[2:]


def test_salts_secrets_and_sharing_keep_prompts_apart() -> None:
    memory = PrefixMemory(b"secret")
    memory.remember(memory.named(PROMPT, ""), ANSWERED, "session", ROUTE)
    names = {
        "mine": memory.named(PROMPT, ""),
        "salted": memory.named(PROMPT, "salt"),
        "another client's": PrefixMemory(b"other").named(PROMPT, ""),
        "shared": memory.named(PROMPT, "", shared=True),
    }
    assert [who for who, each in names.items() if each.known_tokens] == ["mine"]
    assert len({each.digests for each in names.values()}) == len(names)
    shared = PrefixMemory(b"other").named(PROMPT, "salt", shared=True)
    assert shared.digests == names["shared"].digests


def test_of_a_shared_prompt_the_answer_is_not_remembered() -> None:
    memory = PrefixMemory(b"secret")
    memory.remember(memory.named(PROMPT, "", shared=True), ANSWERED, "session", ROUTE)
    again = memory.named(ANSWERED, "", shared=True)
    assert again.known_tokens == 32
    assert again.names == again.digests


def test_the_newest_route_counts_and_the_longest_unused_blocks_are_forgotten() -> None:
    memory = PrefixMemory(b"secret", blocks_max=5)
    memory.remember(memory.named(PROMPT, ""), PROMPT, "one", ROUTE)
    memory.remember(memory.named(PROMPT, ""), PROMPT, "two", OTHER)
    assert memory.named(PROMPT, "").route == OTHER
    for number in range(10):
        ids = (number,) * 64
        memory.remember(memory.named(ids, ""), ids, "s", ROUTE)
        assert len(memory) <= 5
    assert memory.named(PROMPT, "").known_tokens == 0


def test_a_prompt_of_any_length_has_a_bounded_number_of_names() -> None:
    memory = PrefixMemory()
    ids = (7,) * (BLOCK_TOKENS * (BLOCKS_MAX + 2))
    assert len(memory.named(ids, "").names) == BLOCKS_MAX
    assert memory.named(ids[:15], "").names == ()


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=6), st.integers(0, 40)), max_size=12)
)
def test_names_stand_for_one_text_each(asked: list[tuple[list[int], int]]) -> None:
    """Whatever was asked before, stages never hear one name for two texts."""
    memory = PrefixMemory(b"secret")
    texts: dict[bytes, tuple[int, ...]] = {}
    for number, (words, answered) in enumerate(asked):
        ids = tuple(word for word in words for _ in range(BLOCK_TOKENS))
        named = memory.named(ids, "")
        for at, name in enumerate(named.names, start=1):
            text = ids[: at * BLOCK_TOKENS]
            assert texts.setdefault(name, text) == text
        ran = (*ids, *(number % 2 for _ in range(answered)))
        for at in range(len(named.names), len(ran) // BLOCK_TOKENS):
            name, text = answer_name(str(number), at), ran[: (at + 1) * BLOCK_TOKENS]
            assert texts.setdefault(name, text) == text
        memory.remember(named, ran, str(number), ROUTE)
