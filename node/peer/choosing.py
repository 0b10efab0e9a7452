"""``node.join`` without a model: finds the model that needs this machine the most."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.plans.catalogue.need import Need, needs
from coordinator.plans.catalogue.precision import PUBLISHED, in_precision
from coordinator.plans.catalogue.reading import network_models, served_models
from dht.checkpoints.gguf_model import hub_root, model_directory
from dht.checkpoints.hub import HubId, local_path, served_name
from dht.checkpoints.model_files import directory_root
from dht.errors import NetworkError, SwarmError, UserError
from dht.messages.types import layers_text, stage_bytes
from dht.process.terminal import printable
from dht.transport.interface import Transport
from node.peer.first_steps import BUNDLED

SHOWN_MAX = 4
LOOKED_AT_MAX = 16
"""Maximum models whose files are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A model that this machine may serve, and where its files are."""

    need: Need
    files: str
    """A directory here, or a hub id."""
    precision: str
    """This machine's precision, in which the model's sizes are."""

    @property
    def fetch_bytes(self) -> int:
        """About how many bytes must be fetched; 0 where the files are here."""
        if local_path(self.files):
            return 0
        published = in_precision(self.need.model, self.precision, PUBLISHED)
        return stage_bytes(published, self.need.start, self.need.end, 0)

    def sentence(self) -> str:
        need = self.need
        count = {0: "nobody", 1: "1 peer"}.get(need.holders, f"{need.holders} peers")
        fetched = (
            f"about {self.fetch_bytes / 1e9:.1f} GB to fetch"
            if self.fetch_bytes
            else "its files are here"
        )
        return (
            f"{need.model.name}: {layers_text((need.start, need.end))} of {need.model.layers},"
            f" the least held of them by {count}; {fetched}"
        )


def files_of(name: str, allowed: Sequence[str]) -> str | None:
    """Where the files of the model ``name`` are: an ``allowed`` path, the bundled ones, or the hub
    id.

    None where the model is not allowed, or its files are not known. A path here that only happens
    to have the model's name does not count.
    """
    for entry in allowed:
        if local_path(entry) and served_name(entry) == name:
            return entry
    if name == BUNDLED.name and not allowed and BUNDLED.is_dir():
        return str(BUNDLED)
    listed = name in allowed or not allowed
    return name if listed and HubId.parse(name) is not None and not Path(name).exists() else None


def root_here(files: str) -> str:
    """The root of the model whose files are there; empty where it is not known.

    Raises UserError and NetworkError.
    """
    if (directory := model_directory(files)) is not None:
        return directory_root(directory)
    hub_id = HubId.parse(files)
    return "" if hub_id is None else hub_root(hub_id)[1]


async def known_root(files: str) -> str:
    """:func:`root_here`; empty, too, where the files cannot be read or the hub be asked."""
    try:
        return await asyncio.to_thread(root_here, files)
    except (UserError, NetworkError):
        return ""


async def choices(
    transport: Transport,
    network: str,
    named: Sequence[str],
    memory_bytes: int,
    allowed: Sequence[str],
    *,
    precision: str,
    said: tuple[str, str] = ("", ""),
) -> tuple[Choice, ...]:
    """What this machine could serve in this ``precision``, most needed first.

    ``said`` is a model's name with its fingerprint's first digits, perhaps none, which an
    invitation or the memory vouches for: other weights under that name are left aside. Raises
    NetworkError, SwarmError where the network announces no model, and UserError where this machine
    can serve none of its models.
    """
    announced = await network_models(transport, network, named, precision)
    if not announced:
        raise SwarmError(f"network {network} announces no model; found one with --model")
    name, digits = said
    specs = [s for s in announced if s.name != name or s.fingerprint.startswith(digits)]
    if not specs:
        raise UserError(
            f"network {network} serves {name} with other weights than the fingerprint {digits[:16]}"
            " that it was said to have"
        )
    wanted = needs(await served_models(transport, network, specs), memory_bytes)
    if not wanted:
        names = ", ".join(spec.name for spec in specs[:SHOWN_MAX])
        raise UserError(f"no layer of {names} fits; lend more with --memory, or add --quantize")
    found = [(need, files_of(need.model.name, allowed)) for need in wanted]
    known = [
        Choice(need=need, files=files, precision=precision)
        for need, files in found
        if files is not None
    ]
    # Anybody can announce other weights under a name.
    roots = [await known_root(each.files) for each in known[:LOOKED_AT_MAX]]
    kept = tuple(
        each for each, root in zip(known, roots, strict=False) if root in {"", each.need.model.root}
    )
    if not kept:
        names = ", ".join(need.model.name for need in wanted[:SHOWN_MAX])
        if allowed or known:
            why = "files here have other weights" if known else "--models allows none of them"
            raise UserError(f"{names}: {why}; give directories or hub ids with --models")
        raise UserError(
            f"{names}: their files are not here, and these names are no hub's; get them from who"
            " runs the network and give their directory or GGUF file with --model, or the hub id"
            " (org/name) that they were published under, which is downloaded"
        )
    return kept


async def agreed(found: Sequence[Choice], *, yes: bool) -> Choice:
    """The first choice, once the owner agrees; raises UserError where nobody can or does."""
    if yes:
        return found[0]
    lines = [f"Needed most by {found[0].sentence()}"]
    lines += [f"       then by {each.sentence()}" for each in found[1:SHOWN_MAX]]
    print(printable("\n".join(lines)), flush=True)
    if not sys.stdin.isatty():
        raise UserError(
            "there is no terminal to ask on: name the model with --model, or those that may be"
            " chosen with --models and add --yes"
        )
    answer = await asyncio.to_thread(input, "Go? [Y/n] ")
    if answer.strip().lower() not in {"", "y", "yes"}:
        raise UserError("nothing was joined; --model says which model to serve")
    return found[0]
