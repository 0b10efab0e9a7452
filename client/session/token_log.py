"""One answer as its owner keeps it: the token log from which everything can be rebuilt.

Pure: no clock, no sockets. Each token is accepted exactly once, whatever routes delivered it.
"""

from dataclasses import dataclass, field

from dht.messages.logprobs import TokenScore
from dht.messages.session import FinishReason, Priority, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """What is asked of the swarm."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    vocab: int = 1 << 24
    """Token ids that a peer may send are below this."""
    priority: Priority = Priority.NORMAL


@dataclass(slots=True, kw_only=True)
class AnswerLog:
    """Prompt and answer so far; ``attempt`` counts the routes that were tried."""

    request: AnswerRequest
    token_ids: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    """One for each of ``token_ids``, where the request wants them."""
    prompt_scores: list[TokenScore] = field(default_factory=list)
    """Of the prompt's tokens from the second on, as far as they came."""
    finish_reason: FinishReason | None = None
    attempt: int = 0

    @property
    def replay_ids(self) -> tuple[int, ...]:
        """The prompt for a new route: everything that is known already."""
        return (*self.request.prompt_ids, *self.token_ids)

    @property
    def remaining_tokens(self) -> int:
        """New tokens still to come at most."""
        return self.request.max_new_tokens - len(self.token_ids)

    @property
    def next_position(self) -> int:
        """Position of the next token of the sequence."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    @property
    def history(self) -> tuple[int, ...]:
        """Token ids that the last stage of a new route has to know (``SessionOpen.history``)."""
        sampling = self.request.sampling
        if sampling.needs_prompt:
            return self.replay_ids
        return tuple(self.token_ids) if sampling.needs_answer else ()

    @property
    def prompt_is_scored(self) -> bool:
        """Whether all scores of the prompt that the request wants are here."""
        if self.request.sampling.prompt_logprobs is None:
            return True
        return len(self.prompt_scores) == len(self.request.prompt_ids) - 1

    def accept_prompt_scores(
        self, *, attempt: int, position: int, scores: tuple[TokenScore, ...]
    ) -> None:
        """Take scores of the prompt's tokens from ``position`` on; each counts once."""
        next_position = 1 + len(self.prompt_scores)
        if attempt == self.attempt and position <= next_position:
            self.prompt_scores.extend(scores[next_position - position :])

    def accept(
        self,
        *,
        attempt: int,
        position: int,
        token_ids: tuple[int, ...],
        scores: tuple[TokenScore, ...] = (),
    ) -> tuple[int, ...]:
        """Take delivered tokens, with a score each where any came; returns those that are new.

        Frames of an older attempt, repeated tokens and frames that would leave a gap give nothing.
        Tokens beyond ``max_new_tokens`` or behind a stop token are never accepted, whatever the
        peer says: the end of an answer is checked here, not believed.
        """
        if (
            self.finish_reason is not None
            or attempt != self.attempt
            or position > self.next_position
        ):
            return ()
        fresh: list[int] = []
        start = self.next_position - position
        for at in range(start, len(token_ids)):
            token_id = token_ids[at]
            fresh.append(token_id)
            self.token_ids.append(token_id)
            if scores:
                self.scores.append(scores[at])
            if token_id in self.request.sampling.stop_token_ids:
                self.finish_reason = FinishReason.STOP
                break
            if self.remaining_tokens == 0:
                self.finish_reason = FinishReason.LENGTH
                break
        return tuple(fresh)
