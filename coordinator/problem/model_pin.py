"""Which of the models that peers announce under one name is meant. Pure.

Identities cost nothing, so it never counts how many peers announce a model.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dht.errors import UserError
from dht.messages.types import ModelSpec, NodeRecord

DIGITS_MIN = 16
"""Hex digits of a fingerprint that stand for all of them."""
NAMED_MAX = 4
"""Fingerprints named in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPin:
    """What is known of the wanted model besides its name. What is empty allows everything."""

    root: str = ""
    """Root of its directory or hub commit (:func:`dht.checkpoints.model_files.root_of`)."""
    fingerprint: str = ""
    """Its fingerprint, or the first digits of it."""
    named: tuple[str, ...] = ()
    """Peers that the user named, the most trusted first: their word counts before others'."""

    def allows(self, model: ModelSpec) -> bool:
        if self.root and model.root != self.root:
            return False
        return not self.fingerprint or model.fingerprint.startswith(self.fingerprint)


def allowed_models(nodes: Mapping[str, NodeRecord], pin: ModelPin) -> tuple[ModelSpec, ...]:
    """The models that peers announce and the pin allows, one for each fingerprint.

    What the first named peer announces is the only one, where it is allowed.
    """
    models = {
        peer_id: nodes[peer_id].model
        for peer_id in sorted(nodes)
        if pin.allows(nodes[peer_id].model)
    }
    for peer_id in pin.named:
        if peer_id in models:
            return (models[peer_id],)
    return tuple({model.fingerprint: model for model in models.values()}.values())


def several(name: str, models: tuple[ModelSpec, ...]) -> str:
    """The sentence for a name under which peers announce these models."""
    return (
        f"peers announce {len(models)} models as {name} (fingerprints"
        f" {_listed(model.fingerprint for model in models)}); say which with --fingerprint, or by"
        " the model's directory or hub id"
    )


def _listed(fingerprints: Iterable[str]) -> str:
    """The first of some fingerprints, each by its first digits."""
    each = sorted(fingerprint[:DIGITS_MIN] for fingerprint in fingerprints)
    return ", ".join([*each[:NAMED_MAX], *(["…"] if len(each) > NAMED_MAX else [])])


def other_weights(pin: ModelPin, nodes: Mapping[str, NodeRecord]) -> str:
    """The end of the sentence that nobody announces a model, where peers do with other weights."""
    asked = f"fingerprint {pin.fingerprint[:DIGITS_MIN]}" if pin.fingerprint else "the same weights"
    served = _listed({record.model.fingerprint for record in nodes.values()})
    return (
        f" with {asked}; others do, with other weights (fingerprint {served}): if these are the"
        " right ones, give --fingerprint or --model for them"
    )


def checked_fingerprint(text: str) -> str:
    """A fingerprint or its first digits, as a user gives them; raises UserError for other text."""
    digits = text.strip().lower()
    if digits and not re.fullmatch(f"[0-9a-f]{{{DIGITS_MIN},64}}", digits):
        raise UserError(
            f"{text[:80]!r} is no fingerprint: it has {DIGITS_MIN} to 64 hex digits, as join prints"
            " them"
        )
    return digits


def named_peers(initial_peers: Sequence[str]) -> tuple[str, ...]:
    """The peer ids at the ends of these multiaddresses, each once."""
    ends = (address.rstrip("/").rpartition("/p2p/")[2] for address in initial_peers)
    return tuple(dict.fromkeys(ends))
