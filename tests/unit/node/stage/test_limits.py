"""What a stage takes of one peer is enough for a gateway with all the sessions that it may have."""

from client.gateway.web.app import GatewayConfig
from coordinator.policies.failure.detector import WatchConfig
from dht.budget import OPENS, PINGS, STREAMS
from node.stage.config import StageConfig

STREAMS_OF_A_SESSION = 2
"""To the first stage and to the last, which may be one peer."""


def test_a_gateway_with_all_its_sessions_at_one_peer_is_within_every_limit() -> None:
    sessions = StageConfig().sessions_per_client_max
    streams = STREAMS_OF_A_SESSION * sessions
    assert GatewayConfig().answers_at_once_max <= sessions
    assert streams <= STREAMS.per_peer
    assert streams / WatchConfig().ping_every_s <= PINGS.per_s
    assert sessions <= OPENS.burst
