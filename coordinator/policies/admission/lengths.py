"""Estimates how long answers will be, from how long those before were. Pure.

Helix (§5) admits requests by the average length of answers. Here the average is what a stage saw:
the running mean of every client's own answers, and of these the mean. One client is one voice,
however many sessions it opens, and a client whose own answers are longer than the others' is
charged by its own.
"""

from dataclasses import dataclass, field

ANSWER_TOKENS = 240
"""Assumed length of an answer while none has ended: the average that Helix assumes."""
ANSWER_TOKENS_LEAST = 16
"""Minimum estimate, in tokens. A session that comes back after it gave way is expected to run at
least this many more."""
ANSWERS_ASSUMED = 16
"""Number of answers that the assumed length counts as: the first to end do not decide alone."""
ANSWERS_MAX = 64
"""Number of answers, about, over which each client's mean runs."""
CLIENTS_MAX = 256
"""Clients that are remembered; the one that was heard of longest ago is forgotten first."""


@dataclass(slots=True, kw_only=True)
class AnswerLengths:
    """Running means of the lengths of answers, in tokens, by client."""

    means: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Each client's mean and number of answers, the longest unheard first."""
    heard: int = 0
    """Number of answers counted."""
    _sum: float = 0.0

    def ended(self, client: str, tokens: int) -> None:
        """Count an answer of ``client`` that had ``tokens`` tokens."""
        self.heard += 1
        mean, answers = self.means.pop(client, (0.0, 0))
        self._sum -= mean
        answers = min(answers + 1, ANSWERS_MAX)
        mean += (tokens - mean) / answers
        self.means[client] = (mean, answers)
        self._sum += mean
        if len(self.means) > CLIENTS_MAX:
            oldest = next(iter(self.means))
            self._sum -= self.means.pop(oldest)[0]

    @property
    def mean_tokens(self) -> float:
        """The mean over clients; the assumed length counts less with every answer."""
        assumed = ANSWERS_ASSUMED / (ANSWERS_ASSUMED + self.heard)
        seen = max(0.0, self._sum) / max(1, len(self.means))
        return assumed * ANSWER_TOKENS + (1 - assumed) * seen

    def estimate(self, client: str) -> int:
        """Expected tokens of the next answer of ``client``, at least the mean of all."""
        own = self.means.get(client, (0.0, 0))[0]
        return max(ANSWER_TOKENS_LEAST, round(max(own, self.mean_tokens)))
