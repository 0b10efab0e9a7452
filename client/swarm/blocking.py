"""A swarm for programs without an event loop, with the methods of :class:`Swarm`."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from client.answer.generation import Answer, GenerationOptions, Piece
from client.errors import StatusCallback
from client.swarm.swarm import Swarm, SwarmConfig
from dht.messages.types import ModelSpec

T = TypeVar("T")


class BlockingSwarm:
    """:class:`client.swarm.swarm.Swarm` on a thread of its own; :meth:`connect` makes it.

    Methods may be called from several threads; each blocks its caller alone.
    """

    def __init__(self, swarm: Swarm, loop: asyncio.AbstractEventLoop) -> None:
        """``loop`` runs on another thread; ``swarm`` was connected there."""
        self._swarm = swarm
        self._loop = loop
        self.text = swarm.text
        """The model's name, tokenizer and directory."""

    @classmethod
    @contextmanager
    def connect(
        cls,
        initial_peers: str | Sequence[str] = (),
        *,
        model: str = "",
        config: SwarmConfig | None = None,
        on_status: StatusCallback | None = None,
    ) -> "Iterator[BlockingSwarm]":
        """Like :meth:`client.swarm.swarm.Swarm.connect`, for ``with``."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="anabranch client", daemon=True)
        thread.start()
        connected = Swarm.connect(initial_peers, model=model, config=config, on_status=on_status)
        try:
            swarm = _run(loop, connected.__aenter__())
            try:
                yield cls(swarm, loop)
            finally:
                _run(loop, connected.__aexit__(None, None, None))
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def ready_spec(self) -> ModelSpec:
        """The model's description; waits for a first peer as long as an answer would."""
        return _run(self._loop, self._swarm.reader.ready_spec())

    def generate(
        self, prompt: str | Sequence[int], options: GenerationOptions | None = None, **named: object
    ) -> Answer:
        """The whole answer with its figures."""
        return _run(self._loop, self._swarm.generate(prompt, options, **named))

    def stream(
        self, prompt: str | Sequence[int], options: GenerationOptions | None = None, **named: object
    ) -> Iterator[Piece]:
        """Pieces of the answer as they come. Closing the iterator early frees the session."""
        pieces = self._swarm.stream(prompt, options, **named)
        try:
            while True:
                try:
                    yield _run(self._loop, pieces.__anext__())
                except StopAsyncIteration:
                    return
        finally:
            _run(self._loop, pieces.aclose())


def _run(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Wait here for ``work``, which runs on the thread of ``loop``."""
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
