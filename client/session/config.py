"""For how long a client waits for whom, and how often it tries, within one session."""

from dataclasses import dataclass, field

from coordinator.policies.failure.detector import WatchConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    connect_s: float = 4.0
    open_s: float = 10.0
    """Time for every stage to accept or refuse."""
    watch: WatchConfig = field(default_factory=WatchConfig)
    """When the first or the last stage counts as lost although its stream does not break."""
    stall_s: float = 30.0
    """Time without a new token, although the ends answer, after which the route is given up;
    ``watch.known_token_s`` per known token is added until the route's first one."""
    control_bytes_max: int = 1 << 16
    """Maximum bytes of what a stage says besides tokens and scores."""
    token_id_bytes_max: int = 5
    """Bytes of the longest token id in a message."""
    words_max: int = 4096
    """Messages besides tokens and scores that are taken from the ends of one route: a stage that
    leaves says so every second."""
    ask_s: float = 1.5
    """Time for those that may have failed a session to answer a ping."""
    ask_grace_s: float = 0.4
    """The same once one of them answered."""
    leave_s: float = 4.0
    """Time for telling a stage that left the route to free its share."""
    why_max: int = 3
    """Maximum peers of which the caller is told why they are passed over."""
    pace_tokens_least: int = 8
    """Minimum tokens behind the first ones from which a token's time is known."""
    room_tries: int = 4
    """Routes that a request which does not wait tries before it takes the swarm as full."""
    fruitless_max: int = 16
    """Routes in a row without a token after which an answer is given up, once it has waited for as
    long as its client waits: peers that fail in turns would hold it for ever. With ``stall_s``,
    that is some eight minutes, more for long prompts; fewer peers die while their records live."""
    unsound_tries: int = 4
    """Peers that call a request unsound before its client believes it: some may lie. Where fewer
    can be asked, those are enough. Strangers alone never are where a trusted peer serves."""
    paused_s: float = 120.0
    """How long an answer that had to give way at a stage waits for room before its client gives up,
    if that is longer than the client waits otherwise: it was let in, and goes on."""
    relief_every_s: float = 30.0
    """Time between two wishes of one stage for relief that are heard: a move costs something, and
    stages may lie."""
    relief_gap_s: float = 3.0
    """Time between any two wishes that are heard."""
