"""Every protocol that a joined peer speaks has a row of the budget, whichever its transport."""

import json

import pytest

from dht.transport.channels import CHANNELS, LIBRARIES
from testing.forked import forked
from testing.local_swarm import LocalSwarm
from tests.e2e.conftest import MODEL
from tests.e2e.light import HIDING, PYTHON, needs_libp2p, run_light

pytestmark = [pytest.mark.e2e, needs_libp2p]


def test_every_channel_of_a_peer_has_a_row() -> None:
    with LocalSwarm(MODEL, extra=("--threads", "1"), start=forked) as swarm:
        full = swarm.start_peer(name="full", extra=("--layers", "0:8"))
        full.wait_for("serving")
        light = swarm.start_peer(
            name="light", extra=("--layers", "0:8"), python=PYTHON, environment=HIDING
        )
        light.wait_for("serving")
        ask = ["tests.e2e.light_identify", full.address, light.address]
        spoken = json.loads(run_light(ask))
    for protocols in spoken:
        assert len(protocols) > 8
        assert set(protocols) <= CHANNELS.keys() | LIBRARIES.keys()
