"""A swarm for programs without an event loop, with the methods of :class:`Swarm`."""

import asyncio
import atexit
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Self, TypeVar, Unpack

from client.answer.generation import Answer, GenerationOptions, NamedOptions, Piece
from client.errors import StatusCallback
from client.swarm.swarm import Swarm, SwarmConfig
from client.text.chat_prompt import Messages
from client.text.tokenizer import ModelText
from dht.messages.types import ModelSpec

T = TypeVar("T")


class BlockingSwarm:
    """:class:`client.swarm.swarm.Swarm` on a thread of its own; :meth:`connect` makes it.

    A context manager; :meth:`close` does the same. Methods may be called from several threads; each
    blocks its caller alone.
    """

    def __init__(self, connecting: AbstractAsyncContextManager[Swarm]) -> None:
        """Enter the swarm and keep it until :meth:`close`; raises as entering does."""
        self._connecting = connecting
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="anabranch client", daemon=True
        )
        self._thread.start()
        self._closing = threading.Lock()
        self._closed = False
        try:
            self._swarm = self._run(connecting.__aenter__())
        except BaseException:
            self._end()
            raise
        atexit.register(self.close)  # notebooks end without it

    @classmethod
    def connect(
        cls,
        initial_peers: str | Sequence[str] = (),
        *,
        model: str = "",
        config: SwarmConfig | None = None,
        on_status: StatusCallback | None = None,
    ) -> Self:
        """A swarm that is connected, for ``with`` or until :meth:`close`.

        Arguments and errors are those of :meth:`client.swarm.swarm.Swarm.connect`.
        """
        return cls(Swarm.connect(initial_peers, model=model, config=config, on_status=on_status))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the swarm; once is enough."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            atexit.unregister(self.close)
            try:
                self._run(self._connecting.__aexit__(None, None, None))
            finally:
                self._end()

    @property
    def text(self) -> ModelText:
        """The model's name, tokenizer and directory."""
        return self._swarm.text

    def ready_spec(self) -> ModelSpec:
        """The model's description; waits for a first peer as long as an answer would."""
        return self._run(self._swarm.reader.ready_spec())

    def generate(
        self,
        prompt: str | Sequence[int],
        options: GenerationOptions | None = None,
        **named: Unpack[NamedOptions],
    ) -> Answer:
        """The whole answer with its figures."""
        return self._run(self._swarm.generate(prompt, options, **named))

    def stream(
        self,
        prompt: str | Sequence[int],
        options: GenerationOptions | None = None,
        **named: Unpack[NamedOptions],
    ) -> Iterator[Piece]:
        """Pieces of the answer as they come. Closing the iterator early frees the session."""
        pieces = self._swarm.stream(prompt, options, **named)
        try:
            while True:
                try:
                    yield self._run(pieces.__anext__())
                except StopAsyncIteration:
                    return
        finally:
            self._run(pieces.aclose())

    def chat(
        self,
        messages: Messages,
        options: GenerationOptions | None = None,
        **named: Unpack[NamedOptions],
    ) -> Answer:
        """The whole answer to a conversation, as :meth:`client.swarm.swarm.Swarm.chat` says."""
        return self._run(self._swarm.chat(messages, options, **named))

    def stream_chat(
        self,
        messages: Messages,
        options: GenerationOptions | None = None,
        **named: Unpack[NamedOptions],
    ) -> Iterator[Piece]:
        """Pieces of the answer to a conversation, as they come."""
        return self.stream(self._run(self._swarm.chat_prompt(messages)), options, **named)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait here for ``work``, which runs on the swarm's thread. RuntimeError once closed."""
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError("this swarm is closed; connect() makes another")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
