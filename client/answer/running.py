"""One answer in the making: pieces of text as they become certain, figures at the end."""

import asyncio
import operator
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from client.answer.generation import Answer, GenerationOptions, Piece
from client.session.progress import Progress
from client.session.token_log import AnswerLog, AnswerRequest
from client.text.tokenizer import Detokenizer, StopStrings, Tokenizer
from dht.errors import UserError
from dht.messages.logprobs import TokenScore
from dht.messages.session import FinishReason
from dht.messages.types import ModelSpec, Plan, RouteStage


class AnswersTokens(Protocol):
    """What an answer needs of its swarm."""

    tokenizer: Tokenizer | None
    stop_token_ids: tuple[int, ...]
    model_name: str

    @property
    def plan(self) -> Plan | None: ...

    async def ready_spec(self) -> ModelSpec: ...

    def answer_tokens(
        self, log: AnswerLog, progress: Progress
    ) -> AsyncGenerator[tuple[int, ...], None]: ...


def _whole(prompt: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(token_id) for token_id in prompt)
    except TypeError as error:
        raise UserError(f"a prompt is text or a list of token ids: {error}") from None


class Generation:
    """One answer in the making: iterate to get pieces, then ask for :meth:`answer`."""

    def __init__(
        self, swarm: "AnswersTokens", prompt: str | Sequence[int], options: GenerationOptions
    ) -> None:
        self._swarm = swarm
        self._options = options
        if options.stop and swarm.tokenizer is None:
            raise UserError(
                f"stop strings need {swarm.model_name}'s tokenizer: give the model's directory"
            )
        if isinstance(prompt, str):
            if swarm.tokenizer is None:
                raise UserError(
                    f"{swarm.model_name} has no tokenizer here: give the model's directory, or"
                    " the prompt as token ids"
                )
            self._prompt_ids = swarm.tokenizer.encode(prompt)
        else:
            self._prompt_ids = _whole(prompt)
        self._text: list[str] = []
        self._progress = Progress()
        self._log: AnswerLog | None = None
        self._times_s: list[float] = []
        self._started_s = 0.0
        self._finish: FinishReason | None = None
        self._told = 0

    async def __aiter__(self) -> AsyncGenerator[Piece, None]:
        swarm, options = self._swarm, self._options
        self._started_s = asyncio.get_running_loop().time()
        spec = await swarm.ready_spec()
        options.check_ids(self._prompt_ids, spec.vocab)
        request = AnswerRequest(
            prompt_ids=self._prompt_ids,
            max_new_tokens=options.new_tokens(len(self._prompt_ids), spec.context_tokens),
            sampling=options.sampling(swarm.stop_token_ids),
            vocab=spec.vocab,
            priority=options.priority,
        )
        self._log = log = AnswerLog(request=request)
        detokenizer = Detokenizer(swarm.tokenizer) if swarm.tokenizer is not None else None
        stops = StopStrings(options.stop)
        tokens = swarm.answer_tokens(log, self._progress)
        try:
            async for token_ids in tokens:
                self._times_s.append(asyncio.get_running_loop().time())
                text = detokenizer.push(token_ids) if detokenizer is not None else ""
                shown = stops.push(text)
                self._text.append(shown)
                told, self._told = self._told, self._told + len(token_ids)
                scores = tuple(log.scores[told : self._told])
                yield Piece(text=shown, token_ids=token_ids, logprobs=scores)
                if stops.stopped:
                    self._finish = FinishReason.STOP
                    return
        finally:
            await tokens.aclose()
        self._finish = log.finish_reason
        rest = (stops.push(detokenizer.flush()) if detokenizer is not None else "") + stops.flush()
        if rest:
            self._text.append(rest)
            yield Piece(text=rest, token_ids=())

    @property
    def route(self) -> tuple[RouteStage, ...]:
        """The route that the answer takes now; empty before the first."""
        return self._progress.route

    @property
    def prompt_logprobs(self) -> tuple[TokenScore | None, ...] | None:
        """One for each token of the prompt, complete with the first piece; None: not asked."""
        if self._options.prompt_logprobs is None or self._log is None:
            return None
        return (None, *self._log.prompt_scores)

    def answer(self) -> Answer:
        """The finished answer; RuntimeError while it is still being made."""
        if self._log is None or self._finish is None:
            raise RuntimeError("the answer is not finished")
        times_s = self._times_s
        tokens = len(self._log.token_ids)
        plan = self._swarm.plan
        return Answer(
            text="".join(self._text) if self._swarm.tokenizer is not None else None,
            token_ids=tuple(self._log.token_ids),
            prompt_tokens=len(self._prompt_ids),
            finish_reason=self._finish,
            ttft_s=times_s[0] - self._started_s,
            tpot_s=(times_s[-1] - times_s[0]) / (tokens - 1) if tokens > 1 else 0.0,
            route=self._progress.route,
            plan_version=str(plan.version) if plan is not None else "none",
            failovers=self._progress.failovers,
            logprobs=tuple(self._log.scores) if self._options.logprobs is not None else None,
            prompt_logprobs=self.prompt_logprobs,
        )
