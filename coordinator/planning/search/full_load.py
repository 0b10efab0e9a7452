"""What peers keep up with under full load, for planners that place layers by peers' rates. Pure.

T_j says how fast a peer decodes while it does nothing else. Under full load it runs prompts, too,
and each session needs KV as long as it lasts: by Little's law, a peer with KV for n sessions passes
on at most n tokens in the time that a token takes around the ring. Where KV is scarce, that bound
falls much faster with the layers that a peer holds than T_j does.
"""

from dataclasses import replace

from coordinator.evaluation.estimate import layer_token_s
from coordinator.problem.service import Service
from dht.messages.types import PlannerNode, Problem


def at_full_load(problem: Problem, service: Service, token_s: float) -> Problem:
    """The problem with rates under full load instead of T_j, for the search alone.

    ``token_s`` is the time of a token around the ring; with 0, KV bounds nothing.
    """
    load = service.workload

    def rates(node: PlannerNode) -> tuple[float, ...]:
        machine = service.machines[node.peer_id]
        each_s = layer_token_s(machine, load)
        found = []
        for layers in range(1, len(node.tokens_per_s) + 1):
            sessions = service.kv_tokens(node.peer_id, layers) / load.kv_tokens
            busy_s = layers * machine.stretch_of(layers) * each_s
            found.append(1 / max(busy_s, token_s / max(sessions, 1e-9), 1e-12))
        return tuple(found)

    nodes = (replace(node, tokens_per_s=rates(node)) for node in problem.nodes)
    return replace(problem, nodes=tuple(nodes))
