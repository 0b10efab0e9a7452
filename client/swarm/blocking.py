"""The same swarm for programs without an event loop."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

from client.answer.generation import Answer, GenerationOptions, Piece
from client.session.progress import StatusCallback
from client.swarm.swarm import Swarm, SwarmConfig
from dht.messages.types import ModelSpec

T = TypeVar("T")


class BlockingSwarm:
    """:class:`client.swarm.swarm.Swarm` on a thread of its own; use as a context manager.

    Methods may be called from several threads; each blocks its caller alone.
    """

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="anabranch client", daemon=True
        )

    @classmethod
    def connect(
        cls,
        initial_peers: Sequence[str],
        *,
        model: str,
        config: SwarmConfig | None = None,
        on_status: StatusCallback | None = None,
    ) -> "BlockingSwarm":
        """Like :meth:`client.swarm.swarm.Swarm.connect`."""
        return cls(Swarm.connect(initial_peers, model=model, config=config, on_status=on_status))

    def __enter__(self) -> "BlockingSwarm":
        self._thread.start()
        try:
            self._run(self._swarm.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._run(self._swarm.__aexit__(None, None, None))
        finally:
            self._stop()

    def ready_spec(self) -> ModelSpec:
        """The model's description; waits for a first peer as long as an answer would."""
        return self._run(self._swarm.ready_spec())

    def generate(
        self, prompt: str | Sequence[int], options: GenerationOptions | None = None, **named: object
    ) -> Answer:
        """The whole answer with its figures."""
        return self._run(self._swarm.generate(prompt, options, **named))

    def stream(
        self, prompt: str | Sequence[int], options: GenerationOptions | None = None, **named: object
    ) -> Iterator[Piece]:
        """Pieces of the answer as they come. Closing the iterator early frees the session."""
        pieces = aiter(self._swarm.stream(prompt, options, **named))
        try:
            while True:
                try:
                    yield self._run(_next(pieces))
                except StopAsyncIteration:
                    return
        finally:
            self._run(pieces.aclose())  # type: ignore[attr-defined]  # it is an async generator

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _next(pieces: Any) -> Piece:
    piece: Piece = await anext(pieces)
    return piece
