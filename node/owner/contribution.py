"""Keeps a peer's lifetime contribution in a file beside its identity."""

import json
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dht.process.whole_file import write_whole

logger = logging.getLogger(__name__)

FILE_BYTES_MAX = 4096
COUNT_MAX = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """Sums since the identity was created."""

    tokens: int = 0
    """Tokens computed in the peer's layers: prompt and answer, each token once per session."""
    sessions: int = 0
    """Number of answers that were made with its help: ended or stopped, and not lost here."""
    serving_s: float = 0.0

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
    try:
        with path.open("rb") as file:
            read = json.loads(file.read(FILE_BYTES_MAX))
        made = Contribution(**{name: read[name] for name in ("tokens", "sessions", "serving_s")})
    except (OSError, ValueError, KeyError, TypeError):
        return Contribution()
    whole = isinstance(made.tokens, int) and isinstance(made.sessions, int)
    if not whole or not isinstance(made.serving_s, int | float):
        return Contribution()
    sums = (made.tokens, made.sessions, made.serving_s)
    return made if all(0 <= each <= COUNT_MAX for each in sums) else Contribution()


def save(path: Path, contribution: Contribution) -> None:
    """Replace ``path`` atomically; a failure, such as a full disk, is only logged."""
    try:
        write_whole(path, json.dumps(asdict(contribution)).encode())
    except OSError as error:
        logger.warning("cannot keep this peer's contribution in %s: %s", path, error)
