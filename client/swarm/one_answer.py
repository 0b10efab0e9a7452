"""One answer in the making: tokens of its session become pieces of text, and figures at the end."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING

from client.answer.answer import Answer, Piece
from client.answer.generation import GenerationOptions
from client.session.controller import RouteStatus, SessionController
from client.session.driver import SessionDriver
from client.text.stop_strings import StopStrings
from client.text.tokenizer import Detokenizer
from coordinator.policies.routing.affinity import Route
from dht.errors import UserError
from dht.messages.logprobs import TokenScore
from dht.messages.session import FinishReason

if TYPE_CHECKING:
    from client.swarm.swarm import Swarm


class Generation:
    """One answer in the making: iterate to get pieces, then ask for :meth:`answer`."""

    def __init__(
        self, swarm: "Swarm", prompt: str | Sequence[int], options: GenerationOptions
    ) -> None:
        """Raises UserError for a prompt or stop strings that need a tokenizer, without one."""
        self._swarm = swarm
        self._options = options
        if options.stop and swarm.text.tokenizer is None:
            raise UserError(
                f"stop strings need {swarm.text.name}'s tokenizer: give the model's directory"
            )
        self._prompt_ids = swarm.text.prompt_ids(prompt)
        self.continues = isinstance(prompt, str)
        """Whether the answer's text goes on with the prompt's; set before the first piece."""
        self.on_route: Callable[[RouteStatus], None] | None = None
        """Hears how it stands with the route, whenever that changes; set before the first piece."""
        self._session: SessionDriver | None = None
        """Runs the answer's session, once that has begun."""
        self._text: list[str] = []
        self._times_s: list[float] = []
        self._started_s = 0.0
        self._finish: FinishReason | None = None
        self._told = 0
        """Tokens of the answer so far: more may have come with the one that ends a stop string."""
        self._stops = StopStrings(options.stop)

    async def __aiter__(self) -> AsyncGenerator[Piece, None]:
        swarm, options, loop = self._swarm, self._options, asyncio.get_running_loop()
        self._started_s = loop.time()
        with swarm.narrator.waiting(lambda: swarm.reader.waits_for):
            spec = swarm.view.spec or await swarm.reader.ready_spec()
        request = options.request(self._prompt_ids, spec, swarm.text.stop_token_ids)
        session = swarm.session(request)
        self._session = session
        session.on_route = self.on_route
        log = session.controller.log
        tokenizer, stops = swarm.text.tokenizer, self._stops
        before = self._prompt_ids if self.continues else ()
        detokenizer = Detokenizer(tokenizer, before) if tokenizer is not None else None
        # The token that ends a stop string is the answer's last, however many come at once.
        most = 1 if options.stop else swarm.config.piece_tokens_max
        tokens = session.tokens()
        try:
            while True:
                with swarm.narrator.waiting(self._waits_for):
                    token_ids = await anext(tokens, None)
                swarm.narrator.heard()
                if token_ids is None:
                    break
                self._times_s.append(loop.time())
                for at in range(0, max(1, len(token_ids)), most):
                    if at:
                        await asyncio.sleep(0)
                    some = token_ids[at : at + most]
                    text = detokenizer.push(some) if detokenizer is not None else ""
                    shown = stops.push(text)
                    self._text.append(shown)
                    scores = tuple(log.scores[self._told : self._told + len(some)])
                    self._told += len(some)
                    yield Piece(text=shown, token_ids=some, logprobs=scores)
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
    def _controller(self) -> SessionController | None:
        return None if self._session is None else self._session.controller

    def _waits_for(self) -> str:
        if self._session is not None and self._session.waits_for:
            return self._session.waits_for
        hops = dict.fromkeys(hop.peer_id for hop in self.route)
        route = ", ".join(map(self._swarm.view.name_of, hops))
        what = "token" if self._times_s else "first token"
        return f"no {what} yet from {route}" if route else "no route for the answer yet"

    @property
    def route(self) -> Route:
        """The route that the answer takes now; empty before the first."""
        return () if self._controller is None else self._controller.route

    @property
    def cached_tokens(self) -> int:
        """Number of leading tokens of the prompt whose KV the peers had kept; 0 before the first
        piece."""
        return 0 if self._controller is None else self._controller.cached_tokens

    @property
    def prompt_logprobs(self) -> tuple[TokenScore | None, ...] | None:
        """Scores of the prompt's tokens, complete with the first piece; None: not asked for."""
        if self._options.prompt_logprobs is None or self._controller is None:
            return None
        return (None, *self._controller.log.prompt_scores)

    def answer(self) -> Answer:
        """The finished answer; RuntimeError while it is still being made."""
        controller, times_s, plan = self._controller, self._times_s, self._swarm.view.plan
        if controller is None or self._finish is None:
            raise RuntimeError("the answer is not finished")
        token_ids = tuple(controller.log.token_ids[: self._told])
        later = max(1, len(token_ids) - 1)
        mean_s = (times_s[-1] - times_s[0]) / later
        computed_s = min(mean_s, controller.log.computed_s / later)
        return Answer(
            text="".join(self._text) if self._swarm.text.tokenizer is not None else None,
            token_ids=token_ids,
            prompt_tokens=len(self._prompt_ids),
            finish_reason=self._finish,
            ttft_s=times_s[0] - self._started_s,
            tpot_s=mean_s,
            computed_s=computed_s,
            waited_s=min(mean_s - computed_s, controller.log.waited_s / later),
            route=controller.route,
            plan_version=str(plan.version) if plan is not None else "none",
            failovers=controller.failovers,
            stop=self._stops.found,
            cached_tokens=self.cached_tokens,
            drafted_tokens=len(token_ids) - len(times_s),  # all but the first of each round
            fingerprint=controller.log.request.model.fingerprint,
            logprobs=None
            if self._options.logprobs is None
            else tuple(controller.log.scores[: self._told]),
            prompt_logprobs=self.prompt_logprobs,
        )
