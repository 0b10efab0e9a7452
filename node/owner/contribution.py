"""Keeps a peer's lifetime contribution in a file beside its identity."""

import json
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from dht.process.json_file import value_or_none
from dht.process.whole_file import write_whole

logger = logging.getLogger(__name__)

FILE_BYTES_MAX = 4096
COUNT_MAX = 1 << 60
Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """Sums since the identity was created."""

    tokens: Count = 0
    """Tokens computed in the peer's layers: prompt and answer, each token once per session."""
    sessions: Count = 0
    """Number of answers that were made with its help: ended or stopped, and not lost here."""
    serving_s: Annotated[float, Meta(ge=0, le=COUNT_MAX)] = 0.0

    def plus(self, tokens: int, sessions: int, serving_s: float) -> "Contribution":
        """The sums with these amounts added."""
        return replace(
            self,
            tokens=self.tokens + tokens,
            sessions=self.sessions + sessions,
            serving_s=self.serving_s + serving_s,
        )


def load(path: Path) -> Contribution:
    """The contribution in ``path``; zero if missing or damaged, so that joining still works."""
    return value_or_none(path, Contribution, FILE_BYTES_MAX) or Contribution()


def save(path: Path, contribution: Contribution) -> None:
    """Replace ``path`` atomically; a failure, such as a full disk, is only logged."""
    try:
        write_whole(path, json.dumps(asdict(contribution)).encode())
    except OSError as error:
        logger.warning("cannot keep this peer's contribution in %s: %s", path, error)
