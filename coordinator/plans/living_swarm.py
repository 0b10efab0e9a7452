"""Reads a living swarm's records as a planner's input, for an observer that takes no part."""

from collections import Counter

from coordinator.plans.transition import usable_nodes
from coordinator.problem.from_records import problem_of
from coordinator.problem.service import Service, announced_service
from dht.connecting import connect
from dht.errors import UserError
from dht.identity.peer_id import Identity
from dht.messages.types import Problem, model_key
from dht.records.directory import Directory
from dht.transport.config import TransportConfig


async def read_living(
    initial_peers: tuple[str, ...], name: str, network: str
) -> tuple[Problem, Service]:
    """The problem and service of the model ``name``, as its peers announce them now.

    Stores nothing and serves nobody. Raises UserError for malformed addresses and where no peer
    announces the model, NetworkError when no peer answers.
    """
    transport = await connect(
        TransportConfig(identity=Identity.generate(), initial_peers=initial_peers, client_mode=True)
    )
    try:
        return await problem_now(Directory(transport, network, model_key(name)))
    finally:
        await transport.close()


async def problem_now(directory: Directory) -> tuple[Problem, Service]:
    """The problem of placing the model on the peers that announce it, with its commonest weights.

    Raises UserError where no peer announces the model.
    """
    nodes, links = await directory.nodes(), await directory.links()
    if not nodes:
        raise UserError(f"no peer announces {directory.model_key}")
    weights = Counter(record.model.fingerprint for record in nodes.values())
    usual = max(sorted(weights), key=lambda fingerprint: weights[fingerprint])
    model = next(nodes[p].model for p in sorted(nodes) if nodes[p].model.fingerprint == usual)
    usable = usable_nodes(nodes, model, frozenset())
    problem = problem_of(model, usable, links)
    return problem, announced_service(problem)
