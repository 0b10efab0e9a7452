"""Numbers of admission at a stage, each with its reason. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """How full a stage may be, who waits, and for how long. Times in seconds."""

    page_tokens: int = 16
    """Tokens of a page of KV: what is given to a session, and charged to it, at once."""
    headroom_share: float = 0.1
    """Share of a stage's KV, and of its sessions, that ordinary sessions leave free."""
    claim_share: float = 0.75
    """Share of the headroom that all sessions with one claim may take together. Nothing proves a
    claim: a client may say that its answer began elsewhere, and clients and peers to vouch for it
    cost nothing. So a crowd with one claim leaves room for those with the other."""
    queue_sessions_least: int = 16
    """Minimum number of sessions that a stage takes, however long its steps take: a slow peer is
    slow with one session, too."""
    queue_wait_s: float = 0.2
    """Decode time, in seconds, above which a stage is full: more sessions add no tokens, only
    waiting. Twice the time that prompts may take in a step (``decode_s_max`` in
    :mod:`coordinator.policies.batching.scheduler`): a decode waits for the step that runs when it
    comes, and for its own."""
    untried_sessions: int = 16
    """Maximum number of untried sessions, as a client sees them, while few prompts end. A crowd
    comes faster than its tokens; its effect on other sessions shows with this many. With 32,
    Helix's 24 peers in three regions served 5% more under full load, and prompts took twice as
    long."""
    untried_s: float = 5.0
    """Time from its open in which a session counts as untried whether or not rows of its prompt
    wait here; :func:`may_wait_s` adds to it."""
    prompt_tokens_per_s: float = 20.0
    """Pace below which a prompt waits for its client, not for the stages."""
    prompts_wait_s: float = 3.0
    """Time in which the prompts of the untried sessions should end, at the rate of late: beyond it
    a stage takes no more of them. They would hold KV and wait, and bring no more tokens: with 10 s,
    Helix's 24 and 42 peers served as many under full load, and prompts took 1.7 and 3.4 times as
    long."""
    rate_s: float = 30.0
    """Time over which the rate of prompts is counted."""
    rate_most: int = 4096
    """Maximum prompts that it is counted from."""
    prompts_assumed: int = 4
    """Number of prompts that the assumed rate counts as: the first to end do not decide alone."""
    rest_s: float = 10.0
    """Time without progress after which a session *rests*, and gives way to any that finds no
    room."""
    crowd_rest_s: float = 1.0
    """Like ``rest_s``, for a session that has run nothing, if the client that finds no room has
    fewer such sessions."""
    queue_places: int = 4
    """Number of sessions that should have ended before a client refused for slow decodes comes
    back. A place that stays empty for a while costs no tokens there; every refusal does."""
    crowd_s: float = 10.0
    """Time for which a refused client counts as waiting."""
    crowd_max: int = 256
    retry_least_s: float = 0.5
    retry_most_s: float = 600.0
    return_s: float = 30.0
    """Time for which room is left for a session that gave way."""
    returns_max: int = 256
    crowd_part: float = 0.125
    """Share of what a stage's sessions are charged with that a client keeps, however many others
    come."""
    crowd_times: int = 2
    """KV that a client keeps when its sessions make room, as a multiple of what the newcomer's
    client would then have."""
    answer_tokens: int = 240
    """Assumed length of an answer while none has ended: the average that Helix assumes."""
    answer_tokens_least: int = 16
    """Minimum estimate, in tokens. A session that comes back after it gave way is expected to run
    at least this many more."""
    answers_assumed: int = 16
    """Number of answers that the assumed length counts as: the first to end do not decide alone."""
    answers_max: int = 64
    """Number of answers, about, over which each client's mean runs."""
    clients_max: int = 256
    """Clients that are remembered; the one that was heard of longest ago is forgotten first."""


ADMISSION = AdmissionConfig()
