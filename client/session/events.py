"""What happens to a session at its client, and what the client then does: events and effects.

Plain data. :mod:`client.session.controller` decides, :mod:`client.session.driver` performs.
"""

from dataclasses import dataclass

from coordinator.policies.routing.affinity import Route
from coordinator.policies.routing.routes import NoRoute
from dht.messages.logprobs import TokenScore

# Events


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteFound:
    """The answer to a :class:`FindRoute`."""

    route: Route | NoRoute
    doubts_count: bool = True
    """Whether those who called the request unsound are to be believed: one of them delivered before
    or was named by the client's owner, or no such peer serves the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Every stage of the route has reserved; the first one wants token ids at ``position``."""

    attempt: int
    position: int
    rows: bool = True
    """False where the new stage of a move waits for a copy of the KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A stage refused the attempt, or could not be reached, before any work was done."""

    attempt: int
    peer_id: str
    code: str
    reason: str
    retry_after_s: float = 0.0
    suspects: tuple[str, ...] = ()
    """Others that may be at fault instead of ``peer_id``, likelier ones first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A stage of the attempt's route was lost, stalled or broke the protocol."""

    attempt: int
    peer_id: str
    reason: str
    suspects: tuple[str, ...] = ()
    """Others that may be at fault instead of ``peer_id``, likelier ones first."""
    retry_after_s: float = 0.0
    """Seconds until ``peer_id``, which gave its KV to other sessions, expects to have some."""
    watched: bool = False
    """Whether the client's own watch of ``peer_id`` says so, not a stage or the end of a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """Tokens from the last stage."""

    attempt: int
    position: int
    token_ids: tuple[int, ...]
    scores: tuple[TokenScore, ...] = ()
    """One for each token, where the request wants them."""
    computed_s: float = 0.0
    """Seconds that the stages' steps took for tokens that follow others, as they say."""
    waited_s: float = 0.0
    """Seconds for which those tokens' rows waited for the steps, as the stages say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScored:
    """Scores of the prompt's tokens from the last stage."""

    attempt: int
    position: int
    scores: tuple[TokenScore, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A stage of the attempt's route asks to be replaced; it serves on meanwhile."""

    attempt: int
    peer_id: str
    to: str = ""
    """It does not leave: it asks for relief by this freer holder of its layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRouteFound:
    """The answer to a :class:`FindMigrationRoute`."""

    route: Route | NoRoute
    mend: Route
    """The route that was to be mended; the session may have lost it meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationCaughtUp:
    """The new stages of a planned move have run all that was known when it began."""

    attempt: int


Event = (
    RouteFound
    | Accepted
    | Refused
    | Lost
    | Arrived
    | PromptScored
    | Leaving
    | MigrationRouteFound
    | MigrationCaughtUp
)


# Effects


@dataclass(frozen=True, slots=True, kw_only=True)
class FindRoute:
    """Find a route after ``after_s`` and answer with :class:`RouteFound`.

    ``mend`` is the route whose survivors hold the session's KV, empty for a new session; ``lost``
    are its peers that cannot be kept. They may serve again when they are trusted again.
    """

    mend: Route
    lost: frozenset[str]
    after_s: float = 0.0
    without: frozenset[str] = frozenset()
    """Peers that a new session's route must not use: they called the request unsound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Open ``attempt`` over ``route``; answer with Accepted, Refused or Lost."""

    attempt: int
    route: Route


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """Send the known tokens from ``position`` on, and attach to the last stage."""

    attempt: int
    position: int
    behind: bool = False
    """Whether the tokens before ``position`` follow: the first stage has their KV, but drafts from
    their ids, and runs them again if a later stage has to be rebuilt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Close the session at stages that are not on the route any more, as far as they live."""

    attempt: int
    stages: Route


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver:
    """New tokens, each exactly once and in order."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Avoid:
    """Do not use a peer for a while. ``code`` is None for one that failed at work."""

    peer_id: str
    code: str | None
    reason: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TellWait:
    """Tell the caller what the answer waits for."""

    no_route: NoRoute


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """No route for too long, or a request that no stage takes."""

    reason: str
    no_route: NoRoute | None = None
    """None: waiting would not help."""
    is_unsound: bool = False
    """Whether all stages that were asked call the request itself unsound."""
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FindMigrationRoute:
    """Find a route without ``leaving``, while the answer goes on; :class:`MigrationRouteFound`.

    With ``to``, none but that peer may take its place, for the very same layers.
    """

    mend: Route
    leaving: str
    to: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenMigration:
    """Let the new stages of ``route`` run copies of the session's rows under ``attempt``.

    Answer with Accepted (if the first stage is new, and wants the token ids), then
    MigrationCaughtUp, or with Refused or Lost.
    """

    attempt: int
    route: Route
    until: int
    """Index of the last new stage."""
    copy_from: str | None = None
    """Peer that could send the new stage its KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedMigration:
    """Send all known tokens to the new first stage of a move."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyKv:
    """Ask ``source`` to copy its KV to ``to``; answer with MigrationCaughtUp or Refused."""

    attempt: int
    source: str
    to: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DropMigration:
    """The move is off: close its streams."""

    attempt: int


Effect = (
    FindRoute
    | Open
    | Feed
    | Leave
    | Deliver
    | Avoid
    | TellWait
    | GiveUp
    | FindMigrationRoute
    | OpenMigration
    | FeedMigration
    | CopyKv
    | DropMigration
)
