"""Estimates how long answers will be, from how long those before were. Pure.

Helix (§5) admits requests by the average length of answers. Here the average is what a stage saw:
the running mean of every client's own answers, and of these the mean. One client is one voice,
however many sessions it opens, and a client whose own answers are longer than the others' is
charged by its own.
"""

from dataclasses import dataclass, field

from coordinator.policies.admission.config import ADMISSION


@dataclass(slots=True, kw_only=True)
class AnswerLengths:
    """Running means of the lengths of answers, in tokens, by client."""

    means: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Each client's mean and number of answers, the longest unheard first."""
    heard: int = 0
    """Number of answers counted."""
    _sum: float = 0.0

    def ended(self, client: str, tokens: int) -> None:
        self.heard += 1
        mean, answers = self.means.pop(client, (0.0, 0))
        self._sum -= mean
        answers = min(answers + 1, ADMISSION.answers_max)
        mean += (tokens - mean) / answers
        self.means[client] = (mean, answers)
        self._sum += mean
        if len(self.means) > ADMISSION.clients_max:
            oldest = next(iter(self.means))
            self._sum -= self.means.pop(oldest)[0]

    @property
    def mean_tokens(self) -> float:
        """The mean over clients; the assumed length counts less with every answer."""
        assumed = ADMISSION.answers_assumed / (ADMISSION.answers_assumed + self.heard)
        seen = max(0.0, self._sum) / max(1, len(self.means))
        return assumed * ADMISSION.answer_tokens + (1 - assumed) * seen

    def estimate(self, client: str) -> int:
        """Expected tokens of the next answer of ``client``, at least the mean of all."""
        own = self.means.get(client, (0.0, 0))[0]
        return max(ADMISSION.answer_tokens_least, round(max(own, self.mean_tokens)))
