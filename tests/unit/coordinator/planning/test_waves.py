"""Moves in waves: no layer loses its last holder when any order of moves allows it."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from coordinator.planning.waves import Wave, can_be_reached, keepers, waves
from dht.messages.types import Assignment
from tests.examples import examples
from tests.unit.coordinator.planning.waves_check import check_waves

LAYERS = 5
NAMES = "abcdef"


def spans_of(text: str) -> tuple[Assignment, ...]:
    """``"a0-2 b2-5"`` as assignments."""
    parts = (item.replace("-", " ").split() for item in text.split())
    return tuple(
        Assignment(peer_id=head[0], start=int(head[1:]), end=int(end)) for head, end in parts
    )


def test_a_peer_with_no_holder_behind_it_waits_for_the_one_that_comes():
    old = spans_of("a0-2 b2-4 c2-4")
    new = spans_of("a2-4 b0-2 c2-4")
    assert waves(old, new) == (Wave(peers=("b",)), Wave(peers=("a",)))


def test_moves_that_nobody_depends_on_go_at_once():
    old = spans_of("a0-4 b0-4 c0-4")
    new = spans_of("a0-4 b0-2 c2-4 d2-4")
    assert waves(old, new) == (Wave(peers=("b", "c", "d")),)


def test_a_swap_breaks_and_says_so():
    old, new = spans_of("a0-2 b2-4"), spans_of("a2-4 b0-2")
    first, second = waves(old, new)
    assert first.breaks
    assert not second.breaks or first.peers != second.peers


def test_holding_both_avoids_a_gap():
    old, new = spans_of("a0-4"), spans_of("a0-2 b2-4")
    assert waves(old, new, {"a"}) == (Wave(peers=("b",)), Wave(peers=("a",)))
    assert waves(old, new)[-1].breaks == (0, 1)


def test_who_the_plan_does_not_name_serves_on():
    assert waves(spans_of("a0-4 z0-4"), spans_of("a2-4")) == (Wave(peers=("a",)),)


def test_keepers_have_memory_for_both(make):
    old, new = spans_of("a1-4 b1-4"), spans_of("a3-6 b3-6")
    shared_once = 5 * 100 + 2 * 3 * 10
    found = keepers(
        make.model, {"a": shared_once, "b": shared_once - 1}, {"a": 10, "b": 10}, old, new
    )
    assert found == {"a"}


@st.composite
def placements(draw: st.DrawFn, peers: int) -> tuple[Assignment, ...]:
    found = []
    for name in NAMES[:peers]:
        start = draw(st.integers(0, LAYERS))
        end = draw(st.integers(start, LAYERS))
        if start < end:
            found.append(Assignment(peer_id=name, start=start, end=end))
    return tuple(found)


@st.composite
def transitions(draw: st.DrawFn):
    peers = draw(st.integers(1, len(NAMES)))
    keeping = draw(st.sets(st.sampled_from(NAMES[:peers])))
    return draw(placements(peers)), draw(placements(peers)), keeping


@examples(100)
@given(transitions())
def test_every_transition_passes_the_checker_and_every_moment(transition):
    old, new, keeping = transition
    found = waves(old, new, keeping)
    assert check_waves(old, new, keeping, found) == []
    for wave, uncovered in moments(old, new, keeping, found):
        assert uncovered <= set(wave.breaks)


@examples(100)
@given(transitions())
def test_nothing_breaks_when_any_order_allows_it(transition):
    old, new, keeping = transition
    assert any(wave.breaks for wave in waves(old, new, keeping)) != any_order(old, new, keeping)


def test_two_peers_cannot_change_places_unless_a_third_holds_the_layers_of_one():
    old, new = spans_of("a0-2 b2-4 d0-4"), spans_of("a2-4 b0-2")
    assert not can_be_reached(old, new)  # d is not in the placement: nobody may count on it
    assert can_be_reached(old, (*new, *spans_of("c0-2")))


@examples(100)
@given(transitions())
def test_a_placement_is_reached_when_any_order_of_moves_leads_there(transition):
    """Peers that serve nothing while they load are no reason against it."""
    old, new, _ = transition
    planned = {a.peer_id for a in new}
    held = [a for a in old if a.peer_id in planned]
    assert can_be_reached(old, new) == any_order(held, new, planned)


def test_the_checker_finds_planted_faults():
    old, new = spans_of("a0-2 b2-4 c2-4"), spans_of("a2-4 b0-2 c2-4")
    right = waves(old, new)
    assert check_waves(old, new, (), right[::-1])
    assert check_waves(old, new, (), right[:1])
    assert check_waves(old, new, (), (*right, right[0]))
    assert check_waves(old, new, (), (Wave(peers=("a", "b")),))
    assert check_waves(old, new, (), (Wave(peers=("a", "b", "c")),))


def moments(old, new, keeping, found):
    """Each wave with the layers that nobody serves, in every combination of its peers' states."""
    held = {a.peer_id: set(range(a.start, a.end)) for a in old}
    then = {a.peer_id: set(range(a.start, a.end)) for a in new}
    for wave in found:
        needed = set().union(*held.values())
        for states in product(("before", "during", "after"), repeat=len(wave.peers)):
            now = dict(held)
            for peer, state in zip(wave.peers, states, strict=True):
                if state == "after":
                    now[peer] = then[peer]
                elif state == "during" and peer not in keeping:
                    now[peer] = set()
            yield wave, needed - set().union(*now.values())
        held.update({peer: then[peer] for peer in wave.peers})


def any_order(old, new, keeping) -> bool:
    """Whether some order of single moves never takes a layer's last holder; by trying them all."""
    then = {a.peer_id: set(range(a.start, a.end)) for a in new}
    start = {a.peer_id: set(range(a.start, a.end)) for a in old}

    def search(held: dict[str, set[int]], left: frozenset[str]) -> bool:
        if not left:
            return True
        needed = set().union(*held.values())
        for peer in left:
            during = held if peer in keeping else {**held, peer: set()}
            after = {**held, peer: then[peer]}
            covered = set().union(*during.values()) & set().union(*after.values())
            if needed <= covered and search(after, left - {peer}):
                return True
        return False

    return search(start, frozenset(p for p in then if then[p] != start.get(p, set())))
