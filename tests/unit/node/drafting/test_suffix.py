"""The suffix drafter against brute force."""

from hypothesis import given
from hypothesis import strategies as st

from node.drafting.config import DRAFTING
from node.drafting.drafter import Draft
from node.drafting.suffix import GRADE_TOKENS, SuffixDrafter

texts = st.integers(1, 4).flatmap(lambda n: st.lists(st.integers(0, n), max_size=60))


def longest_earlier(tokens: list[int]) -> tuple[int, int]:
    """Length of the longest suffix that occurs earlier, and the end of its leftmost occurrence."""
    here = len(tokens)
    for length in range(here - 1, 0, -1):
        for end in range(length, here):
            if tokens[end - length : end] == tokens[here - length :]:
                return length, end
    return 0, 0


def continued(tokens: list[int], end: int, most: int) -> tuple[int, ...]:
    whole = list(tokens)
    for _ in range(most):
        whole.append(whole[end + len(whole) - len(tokens)])
    return tuple(whole[len(tokens) :])


@given(texts, st.integers(1, 15), st.integers(1, 5))
def test_it_proposes_what_followed_the_longest_earlier_occurrence(
    tokens: list[int], most: int, piece: int
) -> None:
    drafter = SuffixDrafter()
    for at in range(0, len(tokens), piece):
        drafter.extend(tokens[at : at + piece])
    assert drafter.known == len(tokens)
    length, end = longest_earlier(tokens)
    draft = drafter.propose(most)
    if length < DRAFTING.match_least:
        assert draft == Draft()
    else:
        assert draft.token_ids == continued(tokens, end, most)
        assert draft.grade == sum(length >= least for least in GRADE_TOKENS)


@given(texts, st.integers(2, 20))
def test_a_full_window_forgets_the_older_half(tokens: list[int], window: int) -> None:
    drafter = SuffixDrafter(window)
    kept: list[int] = []
    for token_id in tokens:
        if len(kept) >= window:
            kept = kept[len(kept) // 2 :]
        kept.append(token_id)
        drafter.extend((token_id,))
    assert drafter.known == len(tokens)
    fresh = SuffixDrafter()
    fresh.extend(kept)
    assert drafter.propose(5) == fresh.propose(5)


def test_memory_is_an_edge_a_token_at_most() -> None:
    drafter = SuffixDrafter()
    tokens = [n * n % 97 for n in range(5000)]
    drafter.extend(tokens)
    assert len(drafter._edges) < len(tokens)


def test_nothing_is_proposed_before_anything_repeats() -> None:
    drafter = SuffixDrafter()
    assert drafter.propose(4) == Draft()
    drafter.extend([1, 2, 3, 1])
    assert drafter.propose(4) == Draft(), "one token alone says too little"
    drafter.extend([2])
    assert drafter.propose(4).token_ids == (3, 1, 2, 3)
    assert drafter.propose(0) == Draft()
