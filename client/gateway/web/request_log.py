"""What a gateway remembers of a request for its log and its quotas: no text of anybody's. Pure."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from client.gateway.answering.job import Job
from client.gateway.errors import ApiError
from client.gateway.keys import Account
from client.gateway.protocols.answer_bodies import Usage
from client.gateway.protocols.blocks import Took

HUNG_UP = 499
"""Fixed by nginx's usage: the status of a request whose client did not wait."""


@dataclass(slots=True, kw_only=True)
class Asked:
    """A request; times by the event loop's clock."""

    account: Account
    started_s: float
    job: Job | None = None
    """Set once it was understood."""
    has_answered: bool = False
    """Whether a part of its answer was sent."""
    failed: bool = False
    """Whether it failed after its status had been sent."""

    @property
    def usage(self) -> Usage:
        """Tokens that the request has used so far."""
        return Usage() if self.job is None else self.job.usage

    def took(self, now_s: float) -> Took:
        """How long its answer has taken so far."""
        first_s = None if self.job is None else self.job.first_token_s
        first_s = now_s if first_s is None else first_s
        return Took(first_s=first_s - self.started_s, whole_s=now_s - self.started_s)

    @contextmanager
    def spending(self, job: Job, now_s: float) -> Iterator[None]:
        """Run ``job`` within the block, at the account's expense; ``now_s`` is Unix time.

        What fails costs nothing. Raises ApiError where the account has too little left.
        """
        sessions = len(job.tasks)
        with self.account.spending(job.most_tokens, sessions, lambda: self.usage.tokens, now_s):
            self.job = job
            try:
                yield
            except ApiError:
                job.usage = Usage()
                raise

    def told(self, status: int, now_s: float) -> str:
        """Its line in the log, behind method, path and status."""
        job, usage = self.job, self.usage
        first_s = None if job is None else job.first_token_s
        first = "-" if first_s is None else f"{first_s - self.started_s:.3f}"
        return (
            f"{now_s - self.started_s:.3f} s key={self.account.key.name}"
            f" model={'-' if job is None else job.head.model} in={usage.prompt_tokens}"
            f" cached={usage.cached_tokens} out={usage.completion_tokens} first={first}"
            f" outcome={self._outcome(status)}"
        )

    def _outcome(self, status: int) -> str:
        if status == HUNG_UP:
            return "hung_up"
        if self.failed or status >= 400:
            return "failed" if self.failed or status >= 500 else "refused"
        return "done" if self.job is None else self.job.finish or "done"
