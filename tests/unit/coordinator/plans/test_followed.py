"""Which plans a client keeps, of all that peers say they follow."""

from dataclasses import replace

from coordinator.plans.followed import PLANS_MAX, followers_of
from dht.messages.types import NodeRecord, NodeState, PlanVersion
from tests.unit.coordinator.problems import record


def following(peer_id: str, rank: int, rate: float) -> NodeRecord:
    version = PlanVersion(term=1, rank=rank)
    told = replace(record(peer_id, 0, 4), state=NodeState.SERVING, plan_version=version)
    return replace(told, tokens_per_s=(rate,) * 4)


def test_loud_strangers_do_not_push_out_the_plan_that_a_trusted_peer_follows() -> None:
    """Eight identities that announce a lot, each under a plan of its own, had every client forget
    the swarm's plan."""
    crowd = [following(f"x{number}", number + 2, 1e6) for number in range(2 * PLANS_MAX)]
    nodes = {each.peer_id: each for each in (*crowd, following("honest", 1, 5.0))}
    kept = followers_of(nodes, {"honest"}.__contains__)
    assert kept[nodes["honest"].plan_version] == ["honest"]
    assert len(kept) == PLANS_MAX
    assert nodes["honest"].plan_version not in followers_of(nodes, lambda _: False)
