"""Elections under an adversary: loss, late and repeated messages, crashes, cuts, skewed clocks."""

import random
from dataclasses import dataclass, field, replace

import pytest

from coordinator.plans.election.election import (
    ELECTION,
    Elected,
    Election,
    ElectionView,
    LeaseStored,
    StoreLease,
    step,
)
from coordinator.plans.versions import rank
from dht.messages.types import NO_VERSION, LeaseRecord, PlanVersion

TTL_S = 30.0
RECORD_S = 60.0


def lease(peer_id: str, term: int, expires_unix_s: float = 100.0) -> LeaseRecord:
    return LeaseRecord(peer_id=peer_id, term=term, expires_unix_s=expires_unix_s)


def observed(*leases: LeaseRecord, peers: str = "abc", **more) -> ElectionView:
    return ElectionView(
        leases={item.peer_id: item for item in leases}, candidates=frozenset(peers), **more
    )


def lead(peer_id: str, peers: str = "a") -> Election:
    state, effects = step(Election(peer_id=peer_id), observed(peers=peers), 0.0)
    assert effects == (StoreLease(term=1),)
    state, _ = step(state, LeaseStored(term=1), 0.0)
    state, effects = step(state, observed(lease(peer_id, 1), peers=peers), 0.1)
    assert effects[-1] == Elected(peer_id=peer_id, term=1)
    assert state.leading
    return state


def test_alone_it_leads_at_once():
    lead("a")


def test_candidates_wait_their_turn():
    order = sorted("abc", key=lambda peer: rank(peer, 1))
    for place, peer in enumerate(order):
        state = Election(peer_id=peer)
        state, effects = step(state, observed(), 0.0)
        assert bool(effects) == (place == 0)
        _, effects = step(state, observed(), place * ELECTION.stagger_s)
        assert effects == (StoreLease(term=1),)


def test_a_crowd_of_candidates_holds_nobody_up_for_longer_than_the_limit():
    """Names cost nothing: a thousand that do not exist are before and behind it."""
    crowd = replace(observed(), candidates=frozenset(["a", *map(str, range(1000))]))
    state, effects = step(Election(peer_id="a"), crowd, 0.0)
    assert effects == ()
    _, effects = step(state, crowd, ELECTION.stagger_max_s)
    assert effects == (StoreLease(term=1),)


def test_elders_go_first():
    for peer in "ab":
        _, effects = step(Election(peer_id=peer), observed(elders=frozenset("c")), 0.0)
        assert effects == ()
    _, effects = step(Election(peer_id="c"), observed(elders=frozenset("c")), 0.0)
    assert effects == (StoreLease(term=1),)


def test_a_leader_renews_and_fences_itself():
    state = lead("a")
    state, effects = step(state, observed(lease("a", 1), peers="a"), 9.9)
    assert effects == ()
    state, effects = step(state, observed(lease("a", 1), peers="a"), 10.0)
    assert effects == (StoreLease(term=1),)
    state, _ = step(state, observed(lease("a", 1), peers="a"), 20.1)
    assert not state.leading


def test_a_leader_yields_to_a_higher_term():
    state = lead("a")
    state, effects = step(state, observed(lease("a", 1), lease("b", 2)), 1.0)
    assert not state.leading
    assert effects == (Elected(peer_id="b", term=2),)


def test_a_leader_moves_its_term_past_a_higher_version():
    state = lead("a")
    seen = observed(lease("a", 1), peers="a", version=PlanVersion(term=7, counter=3))
    state, effects = step(state, seen, 1.0)
    assert effects == (StoreLease(term=8),)
    state, _ = step(state, observed(lease("a", 8), peers="a"), 1.1)
    assert state.leading
    assert state.term == 8


def test_a_lease_is_void_when_its_holder_neither_answers_nor_renews():
    state = Election(peer_id="b")
    silent = frozenset("a")
    state, _ = step(state, observed(lease("a", 1), peers="ab"), 0.0)
    state, effects = step(state, observed(lease("a", 1), peers="ab", silent=silent), 12.4)
    assert effects == ()
    _, effects = step(state, observed(lease("a", 1), peers="ab", silent=silent), 12.5)
    assert effects == (StoreLease(term=2),)
    # …and one that is renewed stands, though this peer cannot reach its holder.
    renewed = observed(lease("a", 1, 104.0), peers="ab", silent=silent)
    _, effects = step(state, renewed, 12.5)
    assert effects == ()


def test_a_lease_is_void_at_once_when_nobody_reaches_its_holder():
    state = Election(peer_id="b")
    dead = {"silent": frozenset("a"), "dead": frozenset("a")}
    state, _ = step(state, observed(lease("a", 1), peers="ab"), 0.0)
    after, effects = step(state, observed(lease("a", 1), peers="ab", **dead), 4.0)
    assert effects == (StoreLease(term=2),)
    # It was renewed after it fell silent to this peer: somebody can reach it, others or not.
    silent = observed(lease("a", 1), peers="ab", silent=frozenset("a"))
    state, _ = step(state, silent, 4.0)
    renewed = observed(lease("a", 1, 104.0), peers="ab", **dead)
    after, effects = step(state, renewed, 5.0)
    assert effects == ()
    assert after.leader == "a"


def test_who_yielded_to_a_leader_that_is_lost_stands_again_at_once():
    """The others follow the lease that it gave up, which lives on, and do not stand."""
    last = max("abc", key=lambda peer: rank(peer, 3))
    lost = next(peer for peer in "abc" if peer != last)
    state = Election(peer_id=last, term=1)
    leases = lease(last, 1), lease(lost, 2)
    state, effects = step(state, observed(*leases), 0.0)
    assert effects == (Elected(peer_id=lost, term=2),)
    gone = {"silent": frozenset({lost}), "dead": frozenset({lost})}
    for peer in set("abc") - {last, lost}:
        other, _ = step(Election(peer_id=peer), observed(*leases), 0.0)
        _, effects = step(other, observed(*leases, **gone), 1.0)
        assert effects == (Elected(peer_id=last, term=1),)
    _, effects = step(state, observed(*leases, **gone), 1.0)
    assert effects == (StoreLease(term=3),)


def test_terms_that_cannot_be_honest_count_for_nothing():
    made_up = observed(lease("a", 1 << 48), peers="ab", term_max=100)
    state, effects = step(Election(peer_id="b"), made_up, 0.0)
    made_up = replace(made_up, version=PlanVersion(term=1 << 48))
    state, effects = step(state, made_up, 5.0)
    assert effects == (StoreLease(term=1),)


def test_a_claim_of_the_last_term_costs_one_second():
    dead = {"silent": frozenset("a"), "dead": frozenset("a")}
    state, _ = step(Election(peer_id="b"), observed(lease("a", 100), term_max=100), 0.0)
    state, effects = step(state, observed(lease("a", 100), term_max=100, **dead), 5.0)
    assert state.highest_term == 100
    assert effects == ()
    later = observed(lease("a", 100), term_max=101, **dead)
    assert step(state, later, 16.0)[1] == (StoreLease(term=101),)


def test_a_distrusted_leader_is_not_followed():
    state, _ = step(Election(peer_id="b"), observed(lease("a", 9), peers="ab"), 0.0)
    assert state.leader == "a"
    distrusted = observed(lease("a", 9), peers="ab", distrusted=frozenset("a"))
    state, effects = step(state, distrusted, 1.0)
    assert effects == (StoreLease(term=1),)


def test_claims_make_a_leader_change_its_term_seldom():
    state, stored = lead("a"), 0
    for second in range(60):
        claim = PlanVersion(term=state.term + 1)
        seen = observed(lease("a", state.term), peers="a", version=claim)
        before = state.term
        state, _ = step(state, seen, 1.0 + second)
        state, _ = step(state, LeaseStored(term=state.term), 1.0 + second)
        stored += state.term != before
    assert stored == 3


def test_a_lease_without_a_node_record_counts_for_nothing():
    _, effects = step(Election(peer_id="b"), observed(lease("a", 1), peers="b"), 0.0)
    assert effects == (StoreLease(term=1),)


@dataclass
class Peer:
    """What the shell does for one peer, without a network."""

    election: Election
    skew_s: float
    version: PlanVersion = NO_VERSION
    alive: bool = True
    adopted: list[PlanVersion] = field(default_factory=list)


class World:
    """A DHT with stale reads and lost writes; a cut splits it in two."""

    def __init__(self, seed: int, count: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.peers = {
            name: Peer(Election(peer_id=name), self.rng.uniform(-3, 3))
            for name in "abcdefgh"[:count]
        }
        self.side = dict.fromkeys(self.peers, 0)
        self.leases: list[tuple[float, int, LeaseRecord]] = []
        self.plans: list[tuple[float, int, PlanVersion]] = []
        self.died: dict[str, float] = {}
        self.faults = True

    def reads(self, name: str, stored_s: float, side: int) -> bool:
        if side not in {-1, self.side[name]}:
            return False
        stale = self.rng.uniform(0, 4) if self.faults else 0.0
        return stored_s <= self.now_s - stale

    def observe(self, name: str) -> ElectionView:
        leases: dict[str, LeaseRecord] = {}
        for stored_s, side, item in self.leases:
            if item.expires_unix_s > self.now_s and self.reads(name, stored_s, side):
                leases[item.peer_id] = item
        # A cut peer's record is still there, as is that of one that died a minute ago or less.
        seen = frozenset(
            other
            for other, peer in self.peers.items()
            if peer.alive or self.now_s - self.died[other] < RECORD_S
        )
        silent = frozenset(
            other
            for other in seen
            if not self.peers[other].alive or self.side[other] != self.side[name]
        )
        version = max(
            (p.version for o, p in self.peers.items() if self.side[o] == self.side[name]),
            default=NO_VERSION,
        )
        asked = [o for o in seen - silent if o != name][:3]
        dead = frozenset(
            p
            for p in silent
            if not any(self.peers[p].alive and self.side[p] == self.side[w] for w in asked)
        )
        return ElectionView(
            leases=leases, candidates=seen, version=version, silent=silent, dead=dead
        )

    def turn(self, name: str) -> None:
        peer = self.peers[name]
        clock_s = self.now_s + peer.skew_s
        if self.faults and self.rng.random() < 0.2:
            return  # nothing could be read
        sight = self.observe(name)
        for _ in range(self.rng.choice((1, 1, 2)) if self.faults else 1):  # repeated now and then
            peer.election, effects = step(peer.election, sight, clock_s)
            for effect in effects:
                if isinstance(effect, StoreLease) and self.store(name, effect.term):
                    peer.election, _ = step(peer.election, LeaseStored(term=effect.term), clock_s)
        if peer.election.leading and self.rng.random() < 0.3:
            highest = max(sight.version, peer.version)
            version = PlanVersion(
                term=peer.election.term,
                counter=highest.counter + 1,
                rank=rank(name, peer.election.term),
            )
            self.plans.append((self.now_s, self.side[name], version))
        for stored_s, side, version in self.plans[-50:]:
            if self.reads(name, stored_s, side) and version > peer.version:
                peer.version = version
                peer.adopted.append(version)

    def store(self, name: str, term: int) -> bool:
        if self.faults and self.rng.random() < 0.2:
            return False
        expires_s = self.now_s + TTL_S + (self.peers[name].skew_s if self.faults else 0.0)
        self.leases.append((self.now_s, self.side[name], lease(name, term, expires_s)))
        return True

    def harm(self) -> None:
        dice, name = self.rng.random(), self.rng.choice(sorted(self.peers))
        living = [peer for peer in self.peers.values() if peer.alive]
        if dice < 0.02 and len(living) > 1 and self.peers[name].alive:
            self.peers[name].alive = False
            self.died[name] = self.now_s
        elif dice < 0.04 and not self.peers[name].alive:
            before = self.peers[name]
            before.alive, before.election = True, Election(peer_id=name)
        elif dice < 0.06:
            self.side = {peer: self.rng.randrange(2) for peer in self.peers}
        elif dice < 0.1:
            self.heal()

    def heal(self) -> None:
        self.side = dict.fromkeys(self.peers, 0)
        self.leases = [(stored_s, -1, item) for stored_s, _, item in self.leases]
        self.plans = [(stored_s, -1, version) for stored_s, _, version in self.plans]

    def run(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 0.5
            if self.faults:
                self.harm()
            for name in self.rng.sample(sorted(self.peers), len(self.peers)):
                if self.peers[name].alive and self.rng.random() < 0.7:
                    self.turn(name)


@pytest.mark.property
@pytest.mark.parametrize("seed", range(60))
def test_two_leaders_are_harmless_and_become_one(seed):
    world = World(seed, count=2 + seed % 6)
    world.run(150)
    world.faults = False
    world.heal()
    world.run(90)
    living = {name: peer for name, peer in world.peers.items() if peer.alive}
    leaders = [name for name, peer in living.items() if peer.election.leading]
    assert len(leaders) == 1, f"seed {seed}: {leaders}"
    world.run(20)
    assert [n for n, p in living.items() if p.election.leading] == leaders, f"seed {seed}"
    for peer in living.values():
        assert peer.election.leader == leaders[0]
        assert peer.adopted == sorted(set(peer.adopted)), "versions only grow"
    assert max(p.version for p in living.values()).term == living[leaders[0]].election.term
