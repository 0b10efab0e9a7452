"""How a consumer's commands reach the swarm that they mean, and what they remember of it."""

import argparse
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import fields
from functools import partial
from typing import Any

from client.swarm.swarm import Swarm, SwarmConfig
from dht.checkpoints.hub import absolute_model
from dht.errors import NetworkError
from dht.identity.dialling import DialRule
from dht.messages.types import RECORD_BOUNDS, RouteStage
from dht.networks.remembered import Remembered, remember
from dht.process.supervision import beside
from dht.process.terminal import printable
from dht.transport.interface import Transport


def settled_swarm(
    arguments: argparse.Namespace,
    on_status: Callable[[str], None] | None = None,
    **options: Any,
) -> AbstractAsyncContextManager[Swarm]:
    """The swarm that a command's settled arguments mean, for ``async with``.

    Arguments with the name of a field of :class:`client.swarm.swarm.SwarmConfig` are that field;
    ``options`` are further ones. Entering raises as :meth:`client.swarm.swarm.Swarm.connect` does.
    """
    given = vars(arguments)
    named = {each.name: given[each.name] for each in fields(SwarmConfig) if each.name in given}
    config = SwarmConfig(**named, **options)
    return Swarm.connect(
        arguments.initial_peers, model=arguments.model, config=config, on_status=on_status
    )


@asynccontextmanager
async def lasting_swarm(
    arguments: argparse.Namespace,
    on_status: Callable[[str], None] | None = None,
    **options: Any,
) -> AsyncIterator[Swarm]:
    """:func:`settled_swarm` for a command that runs on by itself.

    The block ends with NetworkError or MachineError where this process is cut off for good: what
    starts it again would else wait for an end that never comes.
    """
    connecting = settled_swarm(arguments, on_status, **options)
    async with connecting as swarm, beside(partial(_watch_network, swarm.transport)):
        yield swarm


async def _watch_network(transport: Transport) -> None:
    raise NetworkError(await transport.wait_ended())


def remember_swarm(
    arguments: argparse.Namespace, swarm: Swarm, route: Sequence[RouteStage] = ()
) -> None:
    """Remember a swarm whose model is known, and how it was reached.

    Its addresses are those that the user gave and those of the peers of ``route``, which answered,
    as far as a stranger's word on where it is dialled is taken.
    """
    spec = swarm.view.spec
    if spec is None:
        return
    rule = DialRule.of(arguments.initial_peers, ())
    nodes = swarm.view.nodes
    told = [
        address
        for stage in route
        if stage.peer_id in nodes
        for address in rule.admitted(stage.peer_id, nodes[stage.peer_id].addresses)[:1]
    ]
    first, *others = arguments.initial_peers
    named = arguments.model or swarm.text.name
    remember(
        Remembered(
            network=arguments.network,
            initial_peers=tuple(dict.fromkeys((first, *told, *others)))[
                : RECORD_BOUNDS.addresses_max
            ],
            model=absolute_model(named),
            model_name=swarm.text.name,
            fingerprint=spec.fingerprint,
        ),
        lambda line: print(printable(line), file=sys.stderr, flush=True),
    )
