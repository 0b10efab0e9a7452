"""A swarm of pure decisions, for hundreds of seeds: elections, plans, waves and turns as in the
coordinator's shell, over a DHT that loses, lags and splits, with clocks that differ.

Everything random comes from the seed, so that a seed replays identically. ``trace`` holds what
happened; its digest tells two runs apart.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from coordinator.evaluation.plan_check import uncovered
from coordinator.planning.heuristics.heuristics import chains, keep_layers
from coordinator.planning.heuristics.repair import repair
from coordinator.planning.waves import can_be_reached
from coordinator.plans.election.election import (
    ELECTION,
    LEASE_S,
    Elected,
    Election,
    ElectionView,
    LeaseStored,
    StoreLease,
    step,
)
from coordinator.plans.move_waits import MoveWaitConfig, WaitFor, why_wait
from coordinator.plans.transition import (
    TransitionConfig,
    difference,
    elders,
    usable_nodes,
    with_effects,
)
from coordinator.plans.versions import believed, next_version, number_max, plausible, rank
from coordinator.problem.from_records import problem_of
from coordinator.simulator.core.clock import log_event
from dht.messages.types import (
    NO_VERSION,
    Assignment,
    DeviceSpec,
    LeaseRecord,
    ModelSpec,
    NodeRecord,
    NodeState,
    Plan,
    PlanVersion,
    Problem,
)
from dht.records.directory import LIFETIME_S, RecordKind
from dht.records.sightings import Sightings

LAYERS = 4
START_UNIX_S = 1.7e9
SKEW_S = 3.0
LOSS = 0.02
SILENT_AFTER_S = 3.0
NODE_LIFE_S, PLAN_LIFE_S = LIFETIME_S[RecordKind.NODES], LIFETIME_S[RecordKind.PLAN]
ANNOUNCE_S, PUBLISH_S = 5.0, 60.0
WITNESSES = 3
MODEL = ModelSpec(
    name="paper",
    root="f",
    layers=LAYERS,
    layer_bytes=100,
    embed_bytes=0,
    head_bytes=0,
    kv_bytes_per_token_layer=0,
    activation_bytes=4,
    context_tokens=64,
    vocab=32,
)
TRANSITION = TransitionConfig(elder_s=60.0)
TURN = MoveWaitConfig(earlier_waves_s=20.0, rest_s=5.0, meanwhile_s=20.0)


@dataclass(slots=True)
class Stamped:
    """One version of a record; ``readers`` can see it while the network is cut (None: all)."""

    value: Any
    stored_s: float
    expires_unix_s: float
    readers: frozenset[str] | None


class Broken(AssertionError):
    """A law was broken; the text names the seed."""


@dataclass
class Member:
    """One peer: what its processes would remember."""

    name: str
    skew_s: float
    record: NodeRecord
    election: Election
    sightings: Sightings = field(default_factory=Sightings)
    alive: bool = True
    plan: Plan | None = None
    bodies: dict[PlanVersion, Plan] = field(default_factory=dict)
    adopted: list[PlanVersion] = field(default_factory=list)
    announced_s: float = -1e9
    published_s: float = -1e9
    entering: Plan | None = None
    followed: PlanVersion = NO_VERSION
    """Version of the newest plan that needs nothing more to be done here."""
    loaded_s: float | None = None
    waited: dict[WaitFor, float] = field(default_factory=dict)

    @property
    def version(self) -> PlanVersion:
        return self.plan.version if self.plan is not None else NO_VERSION


class World:
    """Peers, what they wrote, and who can reach whom."""

    def __init__(self, seed: int, count: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.members: dict[str, Member] = {}
        self.dht: dict[str, dict[str, list[Stamped]]] = {"nodes": {}, "lease": {}, "plan": {}}
        self.side: dict[str, int] = {}
        self.apart_s: dict[str, float] = {}
        self.faults = True
        self.hostile: set[str] = set()
        self.trace = hashlib.sha256()
        for name in "abcdefgh"[:count]:
            self._join(name)

    def _join(self, name: str) -> None:
        layers = self.rng.choice((2, 3, 4, 4))
        record = NodeRecord(
            peer_id=name,
            name=name,
            software_version="0",
            device=DeviceSpec(kind="cpu", name="paper", memory_bytes=1),
            model=MODEL,
            memory_bytes=100 * layers,
            kv_tokens_min=0,
            tokens_per_s=tuple(100.0 / (n + 1) for n in range(LAYERS)),
            state=NodeState.WAITING,
            joined_unix_s=START_UNIX_S + self.now_s,
        )
        self.members[name] = Member(
            name=name,
            skew_s=self.rng.uniform(-SKEW_S, SKEW_S),
            record=record,
            election=Election(peer_id=name),
        )
        self.side.setdefault(name, 0)
        self.apart_s.pop(name, None)

    # What peers see

    def reach(self, one: str, other: str) -> bool:
        return self.members[other].alive and self.side[one] == self.side[other]

    def unix_s(self, member: Member) -> float:
        return START_UNIX_S + self.now_s + member.skew_s

    def write(self, member: Member, kind: str, value: Any, life_s: float) -> bool:
        if self.faults and self.rng.random() < LOSS:
            return False
        versions = self.dht[kind].setdefault(member.name, [])
        del versions[:-6]
        cut = len(set(self.side.values())) > 1
        side = frozenset(p for p in self.side if self.side[p] == self.side[member.name])
        versions.append(
            Stamped(value, self.now_s, self.unix_s(member) + life_s, side if cut else None)
        )
        return True

    def read(self, member: Member, kind: str) -> dict[str, Any] | None:
        if self.faults and self.rng.random() < LOSS:
            return None
        lag_s = self.rng.random() * 2.0 if self.faults else 0.0
        unix_s, until_s = self.unix_s(member), self.now_s - lag_s
        found: dict[str, Any] = {}
        for author, versions in self.dht[kind].items():
            for item in reversed(versions):
                own = author == member.name
                seen = item.readers is None or member.name in item.readers
                if (own or item.stored_s <= until_s) and seen and item.expires_unix_s > unix_s:
                    found[author] = item.value
                    break
        return found

    def silent(self, name: str) -> frozenset[str]:
        """Whom ``name`` pings in vain for long enough."""
        return frozenset(
            p
            for p in self.members
            if p != name
            and not self.reach(name, p)
            and self.now_s - self.apart_s.get(p, 0.0) >= SILENT_AFTER_S
        )

    def dead(self, name: str, silent: frozenset[str]) -> frozenset[str]:
        """Those of the silent whom nobody that can be asked reaches either."""
        asked = [p for p in sorted(self.members) if p != name and self.reach(name, p)][:WITNESSES]
        return frozenset(p for p in silent if all(not self.reach(w, p) for w in asked))

    # What peers do

    def turn(self, member: Member) -> None:
        nodes, leases = self.read(member, "nodes"), self.read(member, "lease")
        if nodes is None or leases is None:
            return
        nodes = member.sightings.look(nodes, self.unix_s(member))
        self._elect(member, nodes, leases)
        if member.election.leading:
            self._plan(member, nodes)
        self._adopt(member, nodes)
        self._follow(member, nodes)
        if self.now_s - member.announced_s >= ANNOUNCE_S:
            self._announce(member)

    def _elect(
        self, member: Member, nodes: dict[str, NodeRecord], leases: dict[str, LeaseRecord]
    ) -> None:
        unix_s, clock_s = self.unix_s(member), self.now_s + member.skew_s
        versions = [believed(record.plan_version, unix_s) for record in nodes.values()]
        silent = self.silent(member.name)
        for _ in range(2):
            observed = ElectionView(
                leases=leases,
                candidates=frozenset(nodes),
                version=max([member.version, *versions]),
                silent=silent,
                dead=self.dead(member.name, silent),
                distrusted=frozenset(self.hostile),
                term_max=number_max(unix_s),
                elders=elders(nodes, unix_s, TRANSITION),
            )
            member.election, effects = step(member.election, observed, clock_s)
            stored = False
            for effect in effects:
                match effect:
                    case StoreLease(term=term):
                        lease = LeaseRecord(
                            peer_id=member.name, term=term, expires_unix_s=unix_s + LEASE_S
                        )
                        if self.write(member, "lease", lease, LEASE_S):
                            stored = True
                            done = LeaseStored(term=term)
                            member.election, _ = step(member.election, done, clock_s)
                    case Elected(peer_id=peer_id, term=term):
                        self.note(f"{member.name} follows {peer_id} {term}")
            again = self.read(member, "lease") if stored else None
            if again is None or member.election.leading:
                return
            leases = again

    def _plan(self, member: Member, nodes: dict[str, NodeRecord]) -> None:
        usable = usable_nodes(nodes, MODEL, self.silent(member.name) | frozenset(self.hostile))
        old = member.plan
        joined, lost = difference(old, usable)
        mine = old is not None and old.coordinator == member.name
        versions = [believed(record.plan_version, self.unix_s(member)) for record in nodes.values()]
        seen = max([member.version, *versions])
        behind = member.version < seen and seen.term <= member.election.term
        every_s = ELECTION.catch_up_s if behind else PUBLISH_S
        republish = self.now_s - member.published_s >= every_s
        if not joined and not lost and not republish:
            return
        if mine and not joined and not lost and not behind:
            self._publish(member, member.version)
            return
        problem = problem_of(MODEL, usable, {}, old)
        found = [
            placed
            for place in (keep_layers, repair, chains)
            if (placed := place(problem)) is not None
        ]
        if not found:
            return
        # As coordinators do, what peers can move to goes before what they would wait for.
        serving = [node.current for node in problem.nodes if node.current is not None]
        spans = next((placed for placed in found if can_be_reached(serving, placed)), found[0])
        term = member.election.term
        plan = Plan(
            version=next_version(seen, term, rank(member.name, term)),
            coordinator=member.name,
            model=MODEL,
            assignments=spans,
            edges=(),
            flow_tokens_per_s=0.0,
            bound_tokens_per_s=0.0,
            planner="paper",
            solve_s=0.0,
            created_unix_s=START_UNIX_S,
        )
        if plan.version <= member.version:
            return
        plan = with_effects(plan, usable)
        self._take(member, plan)
        self._publish(member, plan.version)

    def _publish(self, member: Member, version: PlanVersion) -> None:
        member.published_s = -1e9
        if self.write(member, "plan", version, PLAN_LIFE_S):
            member.published_s = self.now_s

    def _adopt(self, member: Member, nodes: dict[str, NodeRecord]) -> None:
        heads = self.read(member, "plan") or {}
        for author, version in sorted(heads.items(), key=lambda item: item[1], reverse=True):
            if version <= member.version or not plausible(version, self.unix_s(member)):
                continue
            adopters = [p for p, record in sorted(nodes.items()) if record.plan_version == version]
            for holder in (author, *adopters):
                if self.reach(member.name, holder) and version in self.members[holder].bodies:
                    self._take(member, self.members[holder].bodies[version])
                    return

    def _take(self, member: Member, plan: Plan) -> None:
        if uncovered(plan.assignments, LAYERS):
            return
        if plan.version <= member.version:
            raise Broken(
                f"seed {self.seed}: {member.name} went from {member.version} to {plan.version}"
            )
        member.plan = plan
        member.bodies[plan.version] = plan
        member.adopted.append(plan.version)
        self.note(f"{member.name} adopts {plan.version}")

    def _follow(self, member: Member, nodes: dict[str, NodeRecord]) -> None:
        plan, record = member.plan, member.record
        if member.loaded_s is not None:
            if self.now_s < member.loaded_s or member.entering is None:
                return
            done = member.entering.assignment_of(member.name)
            assert done is not None
            member.record = replace(
                record,
                state=NodeState.SERVING,
                start=done.start,
                end=done.end,
                plan_version=member.entering.version,
            )
            member.loaded_s, member.followed = None, member.entering.version
            self._announce(member)
            return
        if plan is None or member.followed == plan.version:
            return
        mine = plan.assignment_of(member.name)
        if mine is None or (record.start, record.end) == (mine.start, mine.end):
            member.record, member.followed = (
                replace(record, plan_version=plan.version),
                plan.version,
            )
            self._announce(member)
            return
        if member.entering is not plan:
            member.entering, member.waited = plan, {}
            member.record = record = replace(record, plan_version=plan.version)
        there = [peer for peer in nodes if self.reach(member.name, peer)]
        for wait in why_wait(plan, record, nodes, nodes, there, self.unix_s(member), TURN):
            if member.waited.get(wait.what, 0.0) < TURN.limit_s(wait.what):
                member.waited[wait.what] = member.waited.get(wait.what, 0.0) + 1.0
                return
        moved = self.unix_s(member) if record.state is NodeState.SERVING else record.moved_unix_s
        member.record = replace(
            record,
            state=NodeState.LOADING,
            start=0,
            end=0,
            moved_unix_s=moved,
            plan_version=plan.version,
        )
        member.loaded_s = self.now_s + self.rng.uniform(1, 5)
        self._announce(member)

    def _announce(self, member: Member) -> None:
        if self.write(member, "nodes", member.record, NODE_LIFE_S):
            member.announced_s = self.now_s

    # What happens to them

    def harm(self) -> None:
        dice, name = self.rng.random(), self.rng.choice(sorted(self.members))
        living = [p for p, m in self.members.items() if m.alive]
        leaders = [p for p in living if self.members[p].election.leading]
        if dice < 0.02 and len(living) > 2:
            self.kill(name)
        elif dice < 0.035 and leaders and len(living) > 2:
            self.kill(self.rng.choice(leaders))
        elif dice < 0.06 and not self.members[name].alive:
            self.note(f"restart {name}")
            self._join(name)
        elif dice < 0.075:
            self.side = {p: self.rng.randrange(2) for p in self.members}
            self._note_cuts()
        elif dice < 0.1:
            self.heal()

    def kill(self, name: str) -> None:
        self.note(f"kill {name}")
        self.members[name].alive = False
        self.apart_s[name] = self.now_s

    def _note_cuts(self) -> None:
        self.note(f"cut {self.side}")
        for p in self.members:
            self.apart_s[p] = self.now_s

    def heal(self) -> None:
        self.note("heal")
        self.side = dict.fromkeys(self.members, 0)
        for kind in self.dht.values():
            for versions in kind.values():
                for item in versions:
                    item.readers = None

    def note(self, text: str) -> None:
        line = f"{self.now_s:.3f} {text}"
        log_event(line)
        self.trace.update(f"{line}\n".encode())

    # Running

    def ticks(self, seconds: float) -> Iterator[None]:
        """Let a second pass per turn; laws are checked after each."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 1.0
            if self.faults:
                self.harm()
            names = sorted(self.members)
            self.rng.shuffle(names)
            for name in names:
                member = self.members[name]
                if member.alive and name not in self.hostile and self.rng.random() < 0.9:
                    self.turn(member)
            self.check_laws()
            yield

    def check_laws(self) -> None:
        for member in self.members.values():
            record = member.record
            if member.adopted != sorted(set(member.adopted)):
                raise Broken(f"seed {self.seed}: versions went back on {member.name}")
            if record.state is NodeState.SERVING and not any(
                plan.assignment_of(member.name)
                == Assignment(peer_id=member.name, start=record.start, end=record.end)
                for plan in member.bodies.values()
            ):
                raise Broken(f"seed {self.seed}: {member.name} serves what no plan gave it")

    def settled(self) -> bool:
        """One leader that all follow, one plan that all adopted and that is served."""
        living = {p: m for p, m in self.members.items() if m.alive and p not in self.hostile}
        leaders = [p for p, m in living.items() if m.election.leading]
        if len(leaders) != 1 or any(m.election.leader != leaders[0] for m in living.values()):
            return False
        plans = {m.version for m in living.values()}
        if not can_hold(living):
            return True
        plan = next(iter(living.values())).plan
        if len(plans) != 1 or plan is None:
            return False
        return all(
            a.peer_id in living
            and living[a.peer_id].record.state is NodeState.SERVING
            and (living[a.peer_id].record.start, living[a.peer_id].record.end) == (a.start, a.end)
            for a in plan.assignments
        )


def can_hold(living: dict[str, Member]) -> bool:
    """Whether these peers can hold the model at all."""
    problem: Problem = problem_of(MODEL, {p: m.record for p, m in living.items()}, {})
    return chains(problem) is not None
