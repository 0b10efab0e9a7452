"""Reads a living swarm's records as a planner's input, for an observer that takes no part."""

from coordinator.plans.transition import usable_nodes
from coordinator.problem.from_records import problem_of
from coordinator.problem.model_pin import ModelPin, allowed_models, named_peers, several
from coordinator.problem.service import Service, announced_service
from dht.errors import UserError
from dht.messages.types import Problem, model_key
from dht.networks.connecting import observe
from dht.records.directory import Directory


async def read_announced_problem(
    initial_peers: tuple[str, ...], name: str, network: str, pin: ModelPin | None = None
) -> tuple[Problem, Service]:
    """The problem and service of the model ``name``, as its peers announce them now.

    ``pin`` says what is known of the model; without it the peers named say which it is. Stores
    nothing and serves nobody. Raises UserError for malformed addresses and where no peer
    announces the model, NetworkError when no peer answers.
    """
    transport = await observe(initial_peers)
    pin = pin or ModelPin(named=named_peers(initial_peers))
    try:
        return await announced_problem(Directory(transport, network, model_key(name)), pin)
    finally:
        await transport.close()


async def announced_problem(directory: Directory, pin: ModelPin) -> tuple[Problem, Service]:
    """The problem of placing the model that ``pin`` means on the peers that announce it.

    Raises UserError where no peer announces it, or peers announce several.
    """
    nodes, links = await directory.nodes(), await directory.links()
    models = allowed_models(nodes, pin)
    if len(models) != 1:
        raise UserError(
            several(directory.model_key, models)
            if models
            else f"no peer announces {directory.model_key}"
        )
    model = models[0]
    usable = usable_nodes(nodes, model, frozenset())
    problem = problem_of(model, usable, links)
    return problem, announced_service(problem)
