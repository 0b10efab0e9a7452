"""A swarm for programs without an event loop, with the methods of :class:`Swarm`."""

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Self, TypeVar, Unpack

from client.answer.answer import Answer, Piece
from client.answer.generation import GenerationOptions, NamedOptions
from client.errors import ClosedError, StatusCallback
from client.swarm.swarm import Swarm, SwarmConfig
from client.text.chat_prompt import Messages
from client.text.tokenizer import ModelText
from dht.messages.types import ModelSpec
from dht.process.supervision import end_all

T = TypeVar("T")


class BlockingSwarm:
    """:class:`client.swarm.swarm.Swarm` on a thread of its own; :meth:`connect` makes it.

    A context manager; :meth:`close` does the same. Methods may be called from several threads; each
    blocks its caller alone. An interrupt ends the answer before it is raised.
    """

    def __init__(self, connecting: AbstractAsyncContextManager[Swarm]) -> None:
        """Enter the swarm and keep it until :meth:`close`; raises as entering does."""
        self._process = os.getpid()
        self._lock = threading.RLock()
        """Held where a call begins and where the swarm is closed: none begins after that."""
        self._closed = False
        self._calls: set[asyncio.Task[Any]] = set()
        self._entered: Future[Swarm] = Future()
        self._loop = asyncio.new_event_loop()
        self._life = self._loop.create_task(self._live(connecting))
        self._thread = threading.Thread(target=self._run, name="anabranch client", daemon=True)
        try:
            self._thread.start()
            self._swarm = self._entered.result()
        except BaseException:
            self.close()
            raise
        atexit.register(self.close)  # notebooks end without it

    def _run(self) -> None:
        """What the thread does: the swarm's whole life, and the end of all that is left of it."""
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._life)
        except BaseException as error:
            if self._entered.done():  # such as a SystemExit out of a callback of the caller's
                raise
            self._entered.set_exception(error)
        finally:
            with self._lock:
                self._closed = True
            self._loop.run_until_complete(self._end())
            self._loop.close()

    async def _live(self, connecting: AbstractAsyncContextManager[Swarm]) -> None:
        async with connecting as swarm:
            self._entered.set_result(swarm)
            try:
                await asyncio.Event().wait()  # until it is cancelled
            finally:
                await end_all(self._calls)

    async def _end(self) -> None:
        await end_all(asyncio.all_tasks() - {asyncio.current_task()})
        await self._loop.shutdown_asyncgens()

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
        """Leave the swarm, and end the answers that other threads wait for; once is enough."""
        if os.getpid() != self._process:
            return  # a fork has nothing of it
        atexit.unregister(self.close)
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._life.cancel)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def text(self) -> ModelText:
        """The model's name, tokenizer and directory."""
        return self._swarm.text

    def ready_spec(self) -> ModelSpec:
        """The model's description; waits for a first peer as long as an answer would."""
        return self._wait(self._swarm.reader.ready_spec())

    def generate(
        self,
        prompt: str | Sequence[int],
        options: GenerationOptions | None = None,
        **named: Unpack[NamedOptions],
    ) -> Answer:
        """The whole answer with its figures; raises as :meth:`Swarm.generate`."""
        return self._wait(self._swarm.generate(prompt, options, **named))

    def generate_all(
        self, asked: Sequence[tuple[Sequence[int], GenerationOptions]], at_once: int
    ) -> list[Answer]:
        """The answers to several prompts, ``at_once`` of them at a time; the first error ends the
        others."""

        async def all_answers() -> list[Answer]:
            turns = asyncio.Semaphore(at_once)

            async def ask(prompt: Sequence[int], options: GenerationOptions) -> Answer:
                async with turns:
                    return await self._swarm.generate(prompt, options)

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(ask(*each)) for each in asked]
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            return [task.result() for task in tasks]

        return self._wait(all_answers())

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
                    yield self._wait(pieces.__anext__())
                except StopAsyncIteration:
                    return
        finally:
            with suppress(RuntimeError):  # nobody can wait: it has ended, or does by itself
                self._wait(pieces.aclose())

    def chat(
        self,
        messages: Messages,
        options: GenerationOptions | None = None,
        **named: Unpack[NamedOptions],
    ) -> Answer:
        """The whole answer to a conversation, as :meth:`client.swarm.swarm.Swarm.chat` says."""
        return self._wait(self._swarm.chat(messages, options, **named))

    def stream_chat(
        self,
        messages: Messages,
        options: GenerationOptions | None = None,
        **named: Unpack[NamedOptions],
    ) -> Iterator[Piece]:
        """Pieces of the answer to a conversation, as they come."""
        return self.stream(self._wait(self._swarm.chat_prompt(messages)), options, **named)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait here for ``work``, which runs on the swarm's thread, and has ended whatever is
        raised. ClosedError where the swarm was closed, RuntimeError on the swarm's own thread."""
        done: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(task := self._loop.create_task(work))
            self._calls.add(task)
            task.add_done_callback(end)

        def end(task: asyncio.Task[T]) -> None:
            self._calls.discard(task)
            if task.cancelled():
                done.set_exception(ClosedError())
            elif (error := task.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(task.result())

        begun = False
        try:
            if os.getpid() != self._process:
                raise ClosedError("this swarm is another process's; connect() makes one here")
            if threading.current_thread() is self._thread:
                raise RuntimeError("a callback cannot wait for an answer: ask from another thread")
            with self._lock:
                if self._closed:
                    raise ClosedError
                begun = True
                self._loop.call_soon_threadsafe(begin)
            return done.result()
        finally:
            if not begun:
                work.close()
            elif not done.done():  # the caller was interrupted
                self._loop.call_soon_threadsafe(lambda: [each.cancel() for each in tasks])
                wait([done])
