"""What :mod:`tests.forked` imports once for all its processes: what peers and clients use."""

import importlib

from dht import lean_hivemind
from node import lean_transformers

MODULES = (
    "client.conversation",
    "client.gateway.server",
    "client.health.app",
    "client.swarm",
    "coordinator.reviewer",
    "coordinator.runtime",
    "dht.hivemind_dht",
    "dht.hivemind_transport",
    "node.hub_shards",
    "node.peer",
    "node.rehearsal",
    "node.stage",
)
lean_hivemind.prepare()
for name in MODULES:
    importlib.import_module(name)
lean_transformers.prepare()
