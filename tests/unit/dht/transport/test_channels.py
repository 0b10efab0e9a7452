"""What strangers can open is bounded by rows of the budget, and the documents say by which."""

import re
from pathlib import Path

from dht.budget import LIMITS
from dht.transport import interface
from dht.transport.channels import CHANNELS, LIBRARIES

ROOT = Path(__file__).parents[4]
THREATS = ROOT / "docs" / "threat-model.md"


def test_every_protocol_has_a_row() -> None:
    named = {value for name, value in vars(interface).items() if name.endswith("_PROTOCOL")}
    assert len(named) > 10
    assert named <= CHANNELS.keys() | LIBRARIES.keys()


def test_a_peer_serves_no_protocol_without_a_name() -> None:
    """Each `serve(…)` names a constant of the interface, so that the test above sees it."""
    served = [
        (file.name, what)
        for room in ("dht", "coordinator", "node", "client")
        for file in (ROOT / room).rglob("*.py")
        for what in re.findall(r"transport\.serve\(\s*([^,\s)]+)", file.read_text("utf-8"))
    ]
    assert len(served) > 6
    for file, what in served:
        assert what == "protocol" or what in vars(interface), (file, what)


def test_every_channel_counts_bytes_or_requests_per_peer_and_in_all() -> None:
    for protocol, limits in CHANNELS.items():
        assert limits, protocol
        assert set(limits) <= set(LIMITS)
    named = {limit.name for limits in CHANNELS.values() for limit in limits}
    assert named == {limit.name for limit in LIMITS}, "no limit without a channel"


def test_the_threat_model_lists_every_channel_as_it_is() -> None:
    section = THREATS.read_text("utf-8").split("### Channels\n")[1].split("\n## ")[0]
    listed = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in section.splitlines()
        if line.startswith("| `")
    ]
    ours = [
        [f"`{name}`", ", ".join(f"`{limit.name}`" for limit in limits)]
        for name, limits in CHANNELS.items()
    ]
    assert listed == ours + [[f"`{name}`", why] for name, why in LIBRARIES.items()]
