"""The models of a network, as the records of those who serve them show them. Pure.

The directory of models (:class:`dht.messages.types.ModelRecord`) says which models there are, at
their peers' word. What is served of a model is counted from the model's own node records.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.problem.model_pin import DIGITS_MIN
from dht.errors import UserError
from dht.messages.types import ModelRecord, ModelSpec, NodeRecord, NodeState, Reach, stage_bytes
from dht.networks.invitation import is_name

MODELS_MAX = 64
"""Maximum models of a network that a reader looks at."""
WAITED_FOR = 0.5
"""What a peer counts as where as much is waited for as it has room for: one like it again would
serve that."""
NAMED_MAX = 8
"""Models named in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    spec: ModelSpec
    precisions: tuple[str, ...] = ()
    """Precisions that its peers compute in."""
    peers: int = 0
    """Number of its peers, those without layers included."""
    holders: tuple[int, ...]
    """Number of peers that serve each layer."""
    coming: tuple[int, ...]
    """Number of peers that serve or load each layer."""
    relieved: tuple[float, ...]
    """The same by what is asked of them: a peer that as much is waited for as it has KV room in all
    counts as ``WAITED_FOR`` of one. Who claims that falsely takes from nobody's count but its own.
    """
    tokens_per_s: float = 0.0
    """The most that all sessions together may get: what the peers of the least served layer were
    measured to run."""
    kv_tokens_free: int = 0
    """Free room for sessions, in tokens: that of the layer with the least."""
    kv_tokens_wanted: int = 0
    """Room that is waited for, in tokens: that of the layer with the most. Sessions that were
    refused lately and ask again want it, and so does headroom for high priority."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def replicas(self) -> int:
        """Number of peers that serve the layer with the fewest of them; 0: it is not served."""
        return min(self.holders)

    @property
    def covered(self) -> int:
        """Number of layers that somebody serves."""
        return sum(count > 0 for count in self.holders)

    @property
    def figures(self) -> dict[str, object]:
        """The model as an object for programs."""
        spec = self.spec
        return {
            "name": spec.name,
            "fingerprint": spec.fingerprint,
            "layers": spec.layers,
            "covered": self.covered,
            "replicas": self.replicas,
            "holders": list(self.holders),
            "peers": self.peers,
            "precisions": list(self.precisions),
            "layer_bytes": spec.layer_bytes,
            "context_tokens": spec.context_tokens,
            "tokens_per_s": round(self.tokens_per_s, 3),
            "kv_tokens_free": self.kv_tokens_free,
            "kv_tokens_wanted": self.kv_tokens_wanted,
        }


def announced_models(
    records: Mapping[str, ModelRecord], named: Sequence[str] = ()
) -> tuple[ModelSpec, ...]:
    """The models in the directory, one for each name and fingerprint, ``MODELS_MAX`` at most.

    Those of the ``named`` peers come first, then those of most peers. Identities cost nothing, so
    neither says that a model is what it claims to be. Names that cannot be said on a command line
    are left out.
    """
    usable = {peer: r.model for peer, r in records.items() if is_name(r.model.name)}
    counts = Counter((model.name, model.fingerprint) for model in usable.values())
    trusted = {(usable[p].name, usable[p].fingerprint) for p in named if p in usable}
    specs = {(usable[peer].name, usable[peer].fingerprint): usable[peer] for peer in sorted(usable)}
    order = sorted(specs, key=lambda known: (known not in trusted, -counts[known], known))
    return tuple(specs[known] for known in order[:MODELS_MAX])


def served_model(spec: ModelSpec, nodes: Mapping[str, NodeRecord]) -> ServedModel:
    """What ``nodes``, the node records under the model's name, say is served of it."""
    same = [
        record
        for record in nodes.values()
        if record.model.serves_with(spec) and record.reach is not Reach.NONE
    ]
    holders, coming = [0] * spec.layers, [0] * spec.layers
    rates, free, wanted = [0.0] * spec.layers, [0] * spec.layers, [0] * spec.layers
    relieved = [0.0] * spec.layers
    for record in same:
        held = range(record.start, min(record.end, spec.layers))
        if record.state not in {NodeState.SERVING, NodeState.LOADING}:
            continue
        counts = 1 - (1 - WAITED_FOR) * _waited_share(record)
        for layer in held:
            coming[layer] += 1
            relieved[layer] += counts
        if record.state is not NodeState.SERVING or len(held) > len(record.tokens_per_s):
            continue
        for layer in held:
            holders[layer] += 1
            rates[layer] += record.tokens_per_s[len(held) - 1]
            free[layer] += record.kv_tokens_free
            wanted[layer] += record.kv_tokens_wanted
    return ServedModel(
        spec=spec,
        precisions=tuple(sorted({record.precision for record in same if record.precision})),
        peers=len(same),
        holders=tuple(holders),
        coming=tuple(coming),
        relieved=tuple(relieved),
        tokens_per_s=min(rates),
        kv_tokens_free=min(free),
        kv_tokens_wanted=max(wanted),
    )


def _waited_share(record: NodeRecord) -> float:
    """The KV that sessions wait for at a peer, as a share of all that it has room for; 1 at most.

    Sessions that it refused wait, and those of high priority for which it keeps room."""
    if not record.kv_tokens_wanted:
        return 0.0
    model, layers = record.model, max(1, record.end - record.start)
    left = record.memory_bytes - stage_bytes(model, record.start, record.end, 0)
    room_tokens = left / (layers * max(1, model.kv_bytes_per_token_layer))
    return min(1.0, record.kv_tokens_wanted / max(1.0, room_tokens))


def only_model(models: Sequence[ModelSpec], network: str) -> ModelSpec:
    """The only model; raises UserError with the models that there are where it is not one."""
    if len(models) == 1:
        return models[0]
    if not models:
        raise UserError(f"network {network} announces no model; give one with --model")
    raise UserError(f"network {network} serves {listed(models)}: say which with --model")


def listed(models: Sequence[ModelSpec]) -> str:
    """Models in a sentence, with fingerprints where names are not enough."""
    counts = Counter(model.name for model in models)
    names = [
        model.name
        if counts[model.name] == 1
        else f"{model.name} (fingerprint {model.fingerprint[:DIGITS_MIN]})"
        for model in models[:NAMED_MAX]
    ]
    more = f" and {len(models) - NAMED_MAX} more" if len(models) > NAMED_MAX else ""
    return ", ".join(names) + more
