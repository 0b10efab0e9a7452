"""The models of the watched network as JSON values, and how to ask and join each. Pure."""

from collections.abc import Sequence

from client.pages.clean import clean_name
from coordinator.plans.catalogue.served import ServedModel
from coordinator.problem.model_pin import DIGITS_MIN
from dht.checkpoints.hub import HubId
from dht.messages.types import ModelSpec
from dht.networks.invitation import is_name
from dht.process.json_file import Json

NO_WORD = "anabranch:…"
"""What stands in a command for an invitation that the page does not have, and is none."""


def models_json(
    models: Sequence[ServedModel], watched: ModelSpec | None, depths: Sequence[int], invitation: str
) -> list[Json]:
    """The models, the ``watched`` one first, then those that are served.

    Holders are the peers' word, but for the watched model: ``depths`` are its believed holders by
    layer. ``invitation`` is in the commands; empty: none is.
    """
    # A stranger may announce the watched model's fingerprint under a name of its own.
    own = None if watched is None else (watched.name, watched.fingerprint)
    rows = [
        _row(each, (each.name, each.spec.fingerprint) == own, depths, invitation) for each in models
    ]
    return sorted(
        rows,
        key=lambda row: (not row["watched"], not row["replicas"], row["name"], row["fingerprint"]),
    )


def _row(model: ServedModel, watched: bool, depths: Sequence[int], invitation: str) -> Json:
    spec = model.spec
    holders = list(depths) if watched and len(depths) == spec.layers else list(model.holders)
    replicas = min(holders)
    return {
        "name": clean_name(spec.name),
        "fingerprint": spec.fingerprint,
        "watched": watched,
        "layers": spec.layers,
        "covered": sum(count > 0 for count in holders),
        "replicas": replicas,
        "verdict": held_verdict(replicas),
        "peers": model.peers,
        "tokens_per_s": model.tokens_per_s if replicas else 0.0,
        **_commands(model, invitation),
    }


def held_verdict(replicas: int) -> str:
    """What is to be said of a model whose layers have at least this many holders."""
    if not replicas:
        return "not whole"
    return "healthy, but fragile" if replicas == 1 else "healthy"


def _commands(model: ServedModel, invitation: str) -> dict[str, str]:
    """What asks the model and what joins it, for a shell; empty for names that a page changes or
    that a shell could take for more."""
    name = model.spec.name
    if not is_name(name) or not clean_name(name).startswith(name[:32]):
        return {"ask": "", "join": ""}
    word = f" {invitation}" if invitation else ""
    files = name if HubId.parse(name) is not None else f"./{name}"
    pin = model.spec.fingerprint[:DIGITS_MIN]
    return {
        "ask": f"anabranch chat{word} --model {name} --fingerprint {pin}",
        # Without an invitation it would found a network of its own.
        "join": f"anabranch join{word or f' {NO_WORD}'} --model {files}",
    }
