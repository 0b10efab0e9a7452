"""Made clusters on which planners are compared: 100, each the same wherever it is made.

``helix-NN`` is one of Helix's clusters with machines taken away, types swapped and links jittered;
``homes-NN`` are volunteers' homes: 3 to 60 consumer GPUs on several continents, whose uplinks are
slower than their downlinks. Planners may be tuned on :data:`TUNING`; :data:`HELD_OUT` is only ever
reported.
"""

import random
from dataclasses import dataclass, replace

from bench.papers.clusters import cluster_path
from coordinator.commands.swarm_file import read_swarm
from coordinator.planning.heuristics.heuristics import coverage
from coordinator.problem.service import kv_capacity
from coordinator.simulator.core.profiles import (
    PeerProfile,
    Points,
    Profiles,
    StepLimits,
)
from dht.messages.types import SINK, SOURCE, Link, ModelSpec, PlannerNode, Problem
from node.profiling.data_sheets import GPUS, DataSheet

EACH = 50
NAMES = tuple(f"{kind}-{number:02}" for number in range(EACH) for kind in ("helix", "homes"))
TUNING = tuple(name for name in NAMES if int(name[-2:]) % 2 == 0)
HELD_OUT = tuple(name for name in NAMES if int(name[-2:]) % 2)

HELIX = (
    "single24/70b",
    "geo24/70b",
    "het42/70b",
    "single24/30b",
    "geo24/30b",
    "het42/30b",
    "small10/30b",
)
TAKEN_MAX = 0.4
"""Maximum share of machines taken away."""
SWAPPED_MAX = 0.4
"""Maximum share of machines that become another type's."""
JITTERS = (0.0, 0.2, 0.5)
"""Standard deviations of the logarithm of the factors on bandwidths, of which one is drawn."""
SPARE_MIN = 1.15
"""Minimum ratio of the layers that machines can hold to the model's."""


HOME_GPUS = ("a4000", "2080ti", "3060", "3090", "4060ti", "4070", "4080", "4090", "5090")
"""GPUs of homes, by their keys in :data:`node.profiling.data_sheets.GPUS`."""
LENT_BYTES_PER_GIB = 0.85e9
"""Bytes that a GPU's owner lends of each GiB of its memory."""
BYTES_SHARE, FLOPS_SHARE = 0.7, 0.45
"""Shares of the data sheet that layers reach."""
LAYER_S = 60e-6
"""Time of a layer that does not depend on its rows: its kernels' starts."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512)
CHUNKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
CONTEXT_TOKENS = 880
"""Mean context of a decode, for which tables are made."""


@dataclass(frozen=True, slots=True)
class _Model:
    layers: int
    hidden: int
    kv_heads: int
    layer_parameters: float
    vocab: int


MODELS = {
    "8b": _Model(32, 4096, 8, 218e6, 128_256),
    "14b": _Model(40, 5120, 8, 330e6, 151_936),
    "32b": _Model(64, 5120, 8, 488e6, 151_936),
    "70b": _Model(80, 8192, 8, 856e6, 128_256),
}
HEAD_DIM = 128

CONTINENTS = ((0.0, 0.0), (6.5, 0.5), (9.0, 5.0))
"""Places on a map in thousands of kilometres: North America, Europe, Asia."""
SPREAD = 1.2
"""Standard deviation of homes around their continent's place."""
S_PER_MEGAMETRE = 0.015
"""Round trip per thousand kilometres, with the detours of cables."""
LAST_MILE_S = (0.004, 0.02)
MBITS = ((100, 20), (250, 40), (500, 50), (500, 100), (1000, 50), (1000, 1000), (300, 300))
"""Down- and uplinks of homes: cable, DSL, fibre."""
CLIENT_RTT_S = 0.08


def load(name: str) -> tuple[Problem, Profiles]:
    """A cluster by its name: made ones, and Helix's as ``cluster/model``."""
    if "/" in name:
        cluster, model = name.split("/")
        return read_swarm(cluster_path(cluster), model)
    if name not in NAMES:
        raise KeyError(f"there is no cluster {name}")
    rng = random.Random(name)
    make = _like_helix if name.startswith("helix") else _homes
    while True:
        problem, profiles = make(rng)
        held = sum(len(node.tokens_per_s) for node in problem.nodes)
        enough = coverage(problem).layers >= problem.model.layers
        if enough and held >= SPARE_MIN * problem.model.layers:
            return problem, profiles


def _like_helix(rng: random.Random) -> tuple[Problem, Profiles]:
    """Some machines of one of Helix's clusters, some as another type's, with other links."""
    problem, profiles = load(rng.choice(HELIX))
    nodes = {node.peer_id: node for node in problem.nodes}
    kept = [name for name in nodes if rng.random() >= TAKEN_MAX * rng.random()]
    types = {name: name for name in kept}
    for name in kept:
        if rng.random() < SWAPPED_MAX * rng.random():
            types[name] = rng.choice(sorted(nodes))
    jitter = rng.choice(JITTERS)
    rates = {name: (nodes[name].up_bytes_per_s, nodes[name].down_bytes_per_s) for name in kept}
    return (
        replace(
            problem,
            nodes=tuple(
                replace(
                    nodes[types[name]],
                    peer_id=name,
                    up_bytes_per_s=rates[name][0],
                    down_bytes_per_s=rates[name][1],
                )
                for name in kept
            ),
            links=tuple(
                replace(
                    link,
                    bandwidth_bytes_per_s=link.bandwidth_bytes_per_s
                    * rng.lognormvariate(0.0, jitter),
                )
                for link in problem.links
                if link.source in types and link.target in types
            ),
        ),
        Profiles(
            peers={
                name: replace(
                    profiles.peers[types[name]],
                    in_bytes_per_s=profiles.peers[name].in_bytes_per_s,
                    out_bytes_per_s=profiles.peers[name].out_bytes_per_s,
                )
                for name in kept
            },
            client_links={
                pair: link
                for pair, link in profiles.client_links.items()
                if set(pair) <= {*kept, SOURCE, SINK}
            },
        ),
    )


def _homes(rng: random.Random) -> tuple[Problem, Profiles]:
    """Homes with one GPU each, and the largest model that a share of their memory holds."""
    count = round(3 * 20 ** rng.random())
    names = [f"home{index}" for index in range(count)]
    gpus = {name: GPUS[rng.choice(HOME_GPUS)] for name in names}
    total = sum(gpu.memory_gib * LENT_BYTES_PER_GIB for gpu in gpus.values())
    share = rng.uniform(0.25, 0.75)
    able = [name for name, m in MODELS.items() if _bytes(m) <= share * total] or ["8b"]
    spec = _spec(rng.choice(able[-2:]))
    continents = rng.sample(CONTINENTS, rng.randint(1, len(CONTINENTS)))
    places, last_mile_s, speeds = {}, {}, {}
    for name in names:
        x, y = rng.choice(continents)
        places[name] = rng.gauss(x, SPREAD), rng.gauss(y, SPREAD)
        last_mile_s[name] = rng.uniform(*LAST_MILE_S)
        down, up = rng.choice(MBITS)
        speeds[name] = 125e3 * up * rng.uniform(0.6, 1.0), 125e3 * down * rng.uniform(0.6, 1.0)
    links = []
    for a in names:
        for b in names:
            if a == b:
                continue
            far = ((places[a][0] - places[b][0]) ** 2 + (places[a][1] - places[b][1]) ** 2) ** 0.5
            links.append(
                Link(
                    source=a,
                    target=b,
                    bandwidth_bytes_per_s=min(speeds[a][0], speeds[b][1]) * rng.uniform(0.5, 1.0),
                    rtt_s=S_PER_MEGAMETRE * far + last_mile_s[a] + last_mile_s[b],
                    measured_unix_s=0.0,
                )
            )
    nodes, peers = [], {}
    for name in names:
        node, peers[name] = _machine(name, gpus[name], spec, speeds[name])
        nodes.append(node)
    problem = Problem(model=spec, nodes=tuple(nodes), links=tuple(links))
    client = problem.client_bandwidth_bytes_per_s, CLIENT_RTT_S / 2
    return problem, Profiles(
        peers=peers,
        client_links={(SOURCE, name): client for name in names}
        | {(name, SINK): client for name in names},
    )


def _bytes(model: _Model) -> float:
    return 2 * (model.layers * model.layer_parameters + 2 * model.hidden * model.vocab)


def _spec(name: str) -> ModelSpec:
    model = MODELS[name]
    return ModelSpec(
        name=name,
        root="made",
        layers=model.layers,
        layer_bytes=round(2 * model.layer_parameters),
        embed_bytes=2 * model.hidden * model.vocab,
        head_bytes=2 * model.hidden * model.vocab,
        kv_bytes_per_token_layer=2 * 2 * model.kv_heads * HEAD_DIM,
        activation_bytes=2 * model.hidden,
        context_tokens=8192,
        vocab=model.vocab,
    )


def _machine(
    name: str, gpu: DataSheet, spec: ModelSpec, speed: tuple[float, float]
) -> tuple[PlannerNode, PeerProfile]:
    """A home's GPU: a step reads the weights once and the KV of every row, and computes."""
    bytes_per_s, flops = BYTES_SHARE * gpu.memory_gb_per_s * 1e9, FLOPS_SHARE * gpu.tflops * 1e12

    def points(rows: tuple[int, ...], context_tokens: int) -> Points:
        read = spec.kv_bytes_per_token_layer * context_tokens
        return (
            (0, 0.0),
            *(
                (
                    n,
                    LAYER_S
                    + max(
                        (spec.layer_bytes + n * read) / bytes_per_s, n * spec.layer_bytes / flops
                    ),
                )
                for n in rows
            ),
        )

    decode = points(BATCHES, CONTEXT_TOKENS)
    memory = int(gpu.memory_gib * LENT_BYTES_PER_GIB)
    held = min(spec.layers, memory // spec.layer_bytes)
    full_s = dict(decode)[64]
    node = PlannerNode(
        peer_id=name,
        memory_bytes=memory,
        kv_tokens_min=0,
        tokens_per_s=tuple(64 / (j * full_s) for j in range(1, held + 1)),
        up_bytes_per_s=speed[0],
        down_bytes_per_s=speed[1],
    )
    return node, PeerProfile(
        prefill=points(CHUNKS, 0),
        decode=decode,
        kv=kv_capacity(spec, node),
        limits=(StepLimits(prefills_max=1),),
        layers_max=held,
        in_bytes_per_s=speed[1],
        out_bytes_per_s=speed[0],
    )
