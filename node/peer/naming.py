"""What others see a peer as, where its owner did not say."""

import argparse
import platform
import re

from node.peer.lent_before import LENT_BEFORE

_NO_NAME = re.compile(r"localhost|[0-9a-f]{12,}|")
"""Names that say nothing of a machine: a container's is a part of its id."""


def machine_name() -> str:
    """This machine's name on its network, without the domain and bytes that are no text; empty
    where it says nothing."""
    whole = platform.node().encode(errors="ignore").decode()
    name = whole.partition(".")[0][: LENT_BEFORE.name_max].strip()
    return "" if _NO_NAME.fullmatch(name.lower()) else name


def settle_name(arguments: argparse.Namespace) -> str:
    """Name the peer after its machine unless ``arguments`` say a name or none, now or last time;
    returns what to tell its owner of that, once."""
    if arguments.name is not None:
        return ""
    arguments.name = machine_name()
    if not arguments.name:
        return ""
    return (
        f"Others see this peer as {arguments.name}; change with --name NAME, or --name= for no name"
    )
