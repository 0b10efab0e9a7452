"""One answer as its owner keeps it: the token log from which everything can be rebuilt.

Pure: no clock, no sockets. Each token is accepted exactly once, whatever routes delivered it.
"""

from dataclasses import dataclass, field

from dht.messages import FinishReason, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """What is asked of the swarm."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling


@dataclass(slots=True, kw_only=True)
class AnswerLog:
    """Prompt and answer so far; ``epoch`` counts the routes that were tried."""

    request: AnswerRequest
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    epoch: int = 0

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

    def accept(self, *, epoch: int, position: int, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Take delivered tokens; returns those that are new.

        Frames of an older epoch, repeated tokens and frames that would leave a gap give nothing.
        Tokens beyond ``max_new_tokens`` or behind a stop token are never accepted, whatever the
        peer says: the end of an answer is checked here, not believed.
        """
        if self.finish_reason is not None or epoch != self.epoch or position > self.next_position:
            return ()
        fresh: list[int] = []
        for token_id in token_ids[self.next_position - position :]:
            fresh.append(token_id)
            self.token_ids.append(token_id)
            if token_id in self.request.sampling.stop_token_ids:
                self.finish_reason = FinishReason.STOP
                break
            if self.remaining_tokens == 0:
                self.finish_reason = FinishReason.LENGTH
                break
        return tuple(fresh)
