"""What :mod:`testing.forked` imports once for all its processes: what peers and clients use."""

import gc
import importlib

from dht.daemon import lean_hivemind
from node.model import lean_transformers

MODULES = (
    "client.text.conversation",
    "client.gateway.web.server",
    "client.health.app",
    "client.swarm.swarm",
    "coordinator.plans.reviewer",
    "coordinator.runtime",
    "dht.daemon.kademlia",
    "dht.daemon.transport",
    "node.weights.hub_shards",
    "node.peer.peer",
    "node.peer.dry_run",
    "node.stage.server",
)
gc.disable()  # nearly all that comes now stays
lean_hivemind.prepare_hivemind()
for name in MODULES:
    importlib.import_module(name)
lean_transformers.prepare_transformers()
gc.collect()
gc.freeze()  # no process that is forked looks for garbage among it, or copies it for that
gc.enable()
