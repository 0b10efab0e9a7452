"""What a draft model says comes next in one session, beside the rounds of its ring. Pure.

A small model draws token after token behind the session's own, in a thread of its own
(:class:`DraftRunner`), while the round is under way. As long as the tokens that come are those it
drew, it goes on; otherwise it begins again behind the first that differs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from dht.messages.session import Sampling
from node.drafting.config import DRAFTING

NOT_DRAFTED_BY = frozenset(
    {"repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "grammar",
     "min_new_tokens", "stop_token_ids", "logprobs", "prompt_logprobs"}
)  # fmt: skip
"""Options of a session by which its drafts are not drawn: they look at the answer so far, or are
no part of a draw."""
_PLAIN = Sampling()


@dataclass(slots=True, kw_only=True, eq=False)
class DraftChain:
    """Tokens drawn one behind the other. Its runner writes ``ran``, ``drawn``, ``spent_s`` and
    ``failed``; all else belongs to the event loop."""

    key: str
    """Name of the session's KV at the runner."""
    sampling: Sampling
    base: int
    """Number of the session's tokens behind which the chain begins."""
    begin: int
    """Position of the first of ``token_ids``; rows before it are at the runner."""
    token_ids: tuple[int, ...]
    """The session's tokens ``[begin, base)``."""
    count: int
    """Tokens to draw; it may grow while the chain runs."""
    wakes_at: int = 0
    """Number of drawn tokens at which the event loop is told."""
    stopped: bool = False
    running: bool = True
    ran: int = field(init=False)
    """Number of leading tokens whose rows were run, drawn ones included."""
    drawn: list[int] = field(default_factory=list)
    spent_s: float = 0.0
    """Time that the steps took, and the waits for other sessions' steps."""
    failed: bool = False

    def __post_init__(self) -> None:
        self.ran = self.begin

    @property
    def goes_on(self) -> bool:
        """Whether another token is wanted."""
        return not self.stopped and not self.failed and len(self.drawn) < self.count

    def rows(self) -> tuple[tuple[int, ...], bool]:
        """Token ids of the next step's rows, and whether a token is drawn behind them."""
        if self.ran >= self.base:
            return tuple(self.drawn[self.ran - self.base :]), True
        ids = self.token_ids[self.ran - self.begin :][: DRAFTING.chain_rows_max]
        return ids, self.ran + len(ids) == self.base


def draft_sampling(sampling: Sampling) -> Sampling:
    """The options by which drafts are drawn in a session.

    With the session's own seed, a draft is more often the token that comes.
    """
    return replace(sampling, **{name: getattr(_PLAIN, name) for name in NOT_DRAFTED_BY})


class DraftRunner(Protocol):
    """Runs a draft model over sessions' tokens, beside the stage's engine."""

    def open(self, key: str, tokens: int) -> bool:
        """Let a session of up to ``tokens`` tokens draw; False where there is no room for it."""
        ...

    def free(self, key: str) -> None:
        """Free what a session holds. Its chain must be stopped."""
        ...

    def draw(self, chain: DraftChain, told: Callable[[], None]) -> None:
        """Go on with a chain while it :attr:`~Chain.goes_on`. On the event loop, ``told`` is called
        at ``chain.wakes_at`` tokens and, ``running`` unset before, at the end."""
        ...


class ModelDrafts:
    """A draft model's proposals in one session."""

    def __init__(
        self, runner: DraftRunner, key: str, sampling: Sampling, told: Callable[[], None]
    ) -> None:
        """``told`` is called when tokens for which :meth:`wake_at` asked are there."""
        self._runner = runner
        self._key = key
        self._sampling = draft_sampling(sampling)
        self._told = told
        self._chain: DraftChain | None = None
        self._known = 0
        self.token_s: float | None = None
        """Time that a token takes to be drawn; None: not measured yet."""

    @property
    def failed(self) -> bool:
        """Whether the draft model cannot go on in this session."""
        return self._chain is not None and self._chain.failed

    @property
    def ready(self) -> tuple[int, ...]:
        """Tokens drawn so far behind those that were followed last."""
        chain = self._chain
        return () if chain is None else tuple(chain.drawn[self._known - chain.base :])

    def follow(self, token_ids: Sequence[int], count: int) -> None:
        """Have ``count`` tokens drawn behind ``token_ids``, the session's tokens so far."""
        chain, known = self._chain, len(token_ids)
        if self.failed or count < 1:
            return
        begin = 0
        if chain is not None:
            self._time(chain)
            came = token_ids[chain.base : known]
            right = 0
            for drawn, token_id in zip(tuple(chain.drawn), came, strict=False):
                if drawn != token_id:
                    break
                right += 1
            if right == len(came):
                self._known = known
                chain.count = max(chain.count, known - chain.base + count)
                self._go_on(chain)
                return
            chain.stopped = True
            begin = min(chain.ran, chain.base + right, known - 1)
        self._known = known
        self._chain = DraftChain(
            key=self._key,
            sampling=self._sampling,
            base=known,
            begin=begin,
            token_ids=tuple(token_ids[begin:known]),
            count=count,
        )
        self._run(self._chain)

    def wake_at(self, count: int) -> None:
        """Ask to be told when ``count`` tokens are ready."""
        if self._chain is not None:
            self._chain.wakes_at = self._known - self._chain.base + count

    def stop(self) -> None:
        """End what is drawn, and free what the session holds; nothing follows."""
        if self._chain is not None:
            self._chain.stopped = True
        self._runner.free(self._key)

    def _run(self, chain: DraftChain) -> None:
        chain.running = True
        self._runner.draw(chain, lambda: self._heard(chain))

    def _go_on(self, chain: DraftChain) -> None:
        if not chain.running and chain.goes_on:
            self._run(chain)

    def _heard(self, chain: DraftChain) -> None:
        if chain is self._chain:
            self._go_on(chain)  # more may have been asked while it ended
            self._told()

    def _time(self, chain: DraftChain) -> None:
        """Learn the time of a token, waits for other sessions included."""
        if not chain.drawn or len(chain.token_ids) > DRAFTING.timed_rows_max:
            return
        newest_s = chain.spent_s / len(chain.drawn)
        before_s = newest_s if self.token_s is None else self.token_s
        self.token_s = before_s + DRAFTING.time_weight * (newest_s - before_s)
