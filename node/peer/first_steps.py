"""The first join on a machine that knows no network and was told no model.

It looks on the local network for a swarm, else founds one with the bundled model, and says what may
come next.
"""

import argparse
import asyncio
from pathlib import Path

from dht.checkpoints.hub import local_path, served_name
from dht.command_line import COMMAND
from dht.errors import NetworkError, UserError
from dht.networks.remembered import shown
from dht.swarm_options import settle_swarm
from node.owner.reporter import Reporter

_HOME = Path(__file__).parents[2]
_CLONED = _HOME / "models" / "brook"
BUNDLED = _CLONED if _CLONED.is_dir() else _HOME / "anabranch" / "brook"
"""The model that comes with this software: in a clone of it, or as it was installed."""
BUNDLED_LEND_BYTES = 1 << 30
"""Most that is lent where nobody said a model: the bundled one, with room for many sessions."""
WHICH = "which model? give --model: its directory, GGUF file or hub id"


def is_bundled(model: str) -> bool:
    """Whether ``model``, a value of ``--model``, is the bundled one, which everybody has."""
    path = local_path(model)
    return path is not None and path.resolve() == BUNDLED.resolve()


BIGGER = {
    "Qwen/Qwen3-0.6B": 1.5,
    "Qwen/Qwen3-1.7B": 4.1,
    "Qwen/Qwen3-4B": 8.0,
    "Qwen/Qwen3-8B": 16.4,
    "Qwen/Qwen3-14B": 29.5,
    "Qwen/Qwen3-32B": 65.5,
}
"""What somebody may want to serve next: one family in sizes for all machines, smallest first, with
the gigabytes of its files in 16 bits a weight, as the hub lists them."""
WEIGHTS_SHARE = 0.8
"""Share of the lent memory for weights; the rest is for sessions."""


def whole_here(lend_bytes: int, weight_bytes: int) -> str | None:
    """The hub id of the largest of :data:`BIGGER` that a machine holds by itself, at
    ``weight_bytes`` a weight; None where none fits."""
    room = lend_bytes * WEIGHTS_SHARE / 1e9
    fit = [hub_id for hub_id, size in BIGGER.items() if size * weight_bytes / 2 <= room]
    return fit[-1] if fit else None


def next_steps(lend_bytes: int, dtype: str) -> str:
    """What somebody may do who has just founded a swarm with the bundled model."""
    text = f"{BUNDLED.name} is a toy, to see how it works."
    found = whole_here(lend_bytes, 4 if dtype == "float32" else 2)
    if found is None:
        return (
            f"{text} Next: a bigger model together with other machines, such as"
            f" `{COMMAND} join --model {next(iter(BIGGER))}`"
        )
    return (
        f"{text} Next: a bigger model. This machine holds {found} by itself"
        f" ({BIGGER[found]:g} GB to fetch), and larger ones together with others:"
        f" `{COMMAND} join --model {found}`"
    )


async def begin_alone(arguments: argparse.Namespace, reporter: Reporter) -> None:
    """Settle on a network and a model for ``arguments`` that name neither: those offered on this
    local network, else a network of one's own with the bundled model.

    Raises UserError where it is not clear which offer is meant, where no model is bundled, and
    where this machine does not have the GPU.
    """
    if arguments.gpu is not None:
        from node.device.hardware import machine_of

        await asyncio.to_thread(machine_of, arguments.gpu, arguments.memory, or_less=True)
    reporter.say("No network is known here, and no model was named.")
    arguments.local, arguments.network, arguments.model = True, arguments.typed_network, None
    try:
        await asyncio.to_thread(settle_swarm, arguments, may_found=True, model="", say=reporter.say)
    except NetworkError as error:  # this machine may be on none
        reporter.say(f"This local network cannot be asked: {error}")
        arguments.initial_peers = []
    arguments.model = ""
    name = arguments.said_model if arguments.initial_peers else BUNDLED.name
    if name == BUNDLED.name and BUNDLED.is_dir():
        arguments.model, arguments.model_name = str(BUNDLED), served_name(str(BUNDLED))
        arguments.fingerprint = arguments.said_fingerprint
    if arguments.initial_peers:
        return
    if not arguments.model:
        raise UserError(WHICH)
    reporter.say(f"Founding a network with the bundled model, {shown(BUNDLED)}")
    arguments.bundled = True
