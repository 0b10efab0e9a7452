"""Reads which models a network has, and what is served of each."""

import asyncio
from collections.abc import Sequence

from coordinator.plans.catalogue.precision import in_precision
from coordinator.plans.catalogue.served import ServedModel, announced_models, served_model
from dht.messages.types import ModelSpec
from dht.records.directory import Directory
from dht.transport.interface import Transport


async def network_models(
    transport: Transport, network: str, named: Sequence[str] = (), precision: str = ""
) -> tuple[ModelSpec, ...]:
    """The models in the network's directory, those of the ``named`` peers first.

    Their sizes are about those in ``precision``; if that is empty, as announced. Raises
    NetworkError where nobody could be asked.
    """
    records = await Directory.of_models(transport, network).models()
    told = {record.model: record.precision for record in records.values()}
    return tuple(
        in_precision(spec, told[spec], precision) for spec in announced_models(records, named)
    )


async def served_models(
    transport: Transport, network: str, specs: Sequence[ModelSpec]
) -> tuple[ServedModel, ...]:
    """What is served of each of these models, by its own node records. Raises NetworkError."""
    keys = sorted({spec.key for spec in specs})
    found = await asyncio.gather(*(Directory(transport, network, key).nodes() for key in keys))
    nodes = dict(zip(keys, found, strict=True))
    return tuple(served_model(spec, nodes[spec.key]) for spec in specs)
