"""Why the swarm did not answer, for people and for programs."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import groupby

from coordinator.policies.routing.routes import NoRoute
from dht.errors import SwarmError, UserError
from dht.messages.types import Assignment, layers_text

StatusCallback = Callable[[str], None]
"""Takes a line about what an answer waits for, or what happened to it."""


def missing_text(
    missing: tuple[tuple[int, int], ...], loading: Sequence[Assignment], holder: str
) -> str:
    """Layers without a holder that ``holder`` (such as "answers"), and which of them peers are
    ``loading``: ``layer 2 is held by nobody that answers; layers 3-7 are being loaded by 2 peers``.
    """
    gaps = sorted(layer for start, end in missing for layer in range(start, end))
    spans = [
        (each.start, each.end)
        for each in loading
        if bisect_left(gaps, each.start) < bisect_left(gaps, each.end)
    ]
    coming: set[int] = set()
    upto = 0
    for start, end in sorted(spans):  # each layer once, however many announce it
        coming.update(range(max(start, upto), end))
        upto = max(upto, end)
    split: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    for start, end in missing:
        for loads, run in groupby(range(start, end), key=coming.__contains__):
            layers = list(run)
            split[loads].append((layers[0], layers[-1] + 1))
    parts = []
    if split[False]:
        parts.append(f"{_are(split[False])} held by nobody that {holder}")
    if split[True]:
        peers = f"{len(spans)} peer{'s' * (len(spans) > 1)}"
        parts.append(f"{_are(split[True])} being loaded by {peers}")
    return "; ".join(parts)


def no_route_text(no_route: NoRoute) -> str:
    """The reason for which there is no route, with the layers that are missing."""
    if not no_route.missing:
        return no_route.reason
    return missing_text(no_route.missing, no_route.loading, "can be reached")


def _are(ranges: Sequence[tuple[int, int]]) -> str:
    one = sum(end - start for start, end in ranges) == 1
    return f"{layers_text(*ranges)} {'is' if one else 'are'}"


class RequestRefusedError(UserError):
    """All peers that were asked call the request itself unsound, such as its grammar: asking again
    would not help."""


class UnavailableError(SwarmError):
    """Some layers are held by nobody that can be reached now.

    ``missing`` are half-open layer ranges; empty when peers hold all layers but refuse.
    ``retry_after_s`` is when a full swarm expects to have room; 0 where nobody can say.
    """

    def __init__(
        self,
        message: str,
        missing: tuple[tuple[int, int], ...] = (),
        *,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.retry_after_s = retry_after_s


class ClosedError(SwarmError, RuntimeError):
    """The swarm was closed, here and not by its peers, before the answer came or was asked for."""

    def __init__(self, message: str = "this swarm is closed; connect() makes another") -> None:
        super().__init__(message)
