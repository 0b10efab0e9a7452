"""An answer whose length nobody said: asked for in parts, until it ends by itself.

Peers keep room for all tokens that a request may get, so one that asks for a whole context is let
in late or not at all. Each part goes on from the prompt and the answer so far, whose KV the peers
still have.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from client.answer.answer import Answer, Piece, whole_answer
from client.answer.generation import GenerationOptions
from client.session.controller import RouteStatus
from client.swarm.swarm import Swarm
from client.text.tokenizer import Detokenizer, Tokenizer
from dht.errors import NetworkError, SwarmError, UserError
from dht.messages.session import FinishReason


def can_go_on(options: GenerationOptions) -> bool:
    """Whether an answer with these options can be cut and gone on with, as if it was one.

    What looks back at the answer alone would take the part before the cut for the prompt.
    """
    looks_back = options.presence_penalty or options.frequency_penalty
    return not (options.max_new_tokens or options.stop or options.grammar or looks_back)


class LongAnswer:
    """An answer in the making, as :class:`client.swarm.one_answer.Generation` is."""

    def __init__(
        self,
        swarm: Swarm,
        tokenizer: Tokenizer,
        prompt: tuple[int, ...],
        options: GenerationOptions,
        *,
        context_tokens: int,
        first_tokens: int,
        part_tokens: int,
        continues: bool = False,
    ) -> None:
        """The first part has ``first_tokens`` at most, each further one ``part_tokens``.
        ``continues``: whether its text goes on with the prompt's."""
        self._swarm = swarm
        self._detokenizer = Detokenizer(tokenizer, prompt if continues else ())
        self._prompt = prompt
        self._options = options
        self._context_tokens = context_tokens
        self._first_tokens = first_tokens
        self._part_tokens = part_tokens
        self._parts: list[Answer] = []
        self._text: list[str] = []
        self.on_route: Callable[[RouteStatus], None] | None = None
        """Hears how it stands with the route; set before the first piece."""
        self.cut = ""
        """Why the answer ended before its end; empty: it did not."""

    async def __aiter__(self) -> AsyncGenerator[Piece, None]:
        prompt, wanted = self._prompt, self._first_tokens
        while True:
            try:
                running = self._swarm.begin(prompt, self._options_of_part(len(prompt), wanted))
                running.on_route = self.on_route
                async with aclosing(aiter(running)) as pieces:
                    async for piece in pieces:
                        yield self._shown(piece, self._detokenizer.push(piece.token_ids))
                self._parts.append(running.answer())
            except (UserError, SwarmError, NetworkError) as error:
                if not self._parts:
                    raise
                self.cut = " ".join(str(error).split())
                break
            if self._parts[-1].finish_reason is not FinishReason.LENGTH:
                break
            prompt = (*prompt, *self._parts[-1].token_ids)
            wanted = min(self._part_tokens, self._context_tokens - len(prompt))
            if wanted < 1:
                self.cut = f"the model's context of {self._context_tokens} tokens is full"
                break
        if rest := self._detokenizer.flush():
            yield self._shown(Piece(text="", token_ids=()), rest)

    def _options_of_part(self, prompt_tokens: int, wanted: int) -> GenerationOptions:
        least = self._options.min_new_tokens - (prompt_tokens - len(self._prompt))
        return replace(
            self._options, max_new_tokens=wanted, min_new_tokens=max(0, min(least, wanted))
        )

    def _shown(self, piece: Piece, text: str) -> Piece:
        """The piece with its text as a part of the whole answer's."""
        self._text.append(text)
        return replace(piece, text=text)

    def answer(self) -> Answer:
        """The answer with the figures of all parts; RuntimeError while the first is being made."""
        if not self._parts:
            raise RuntimeError("the answer is not finished")
        return replace(whole_answer(self._parts), text="".join(self._text))
