"""Threads for what takes long with text, so that the gateway's event loop goes on meanwhile."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from client.gateway.answering.turns import Turns

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadsConfig:
    """How much text is worked on at once."""

    long_size: int = 1 << 16
    """Characters or log probabilities from which on work is long: some 50 ms of it."""
    short_threads: int = 2
    long_threads: int = 1


THREADS = ThreadsConfig()


class TextThreads:
    """Runs templates, tokenizers and writers of log probabilities, few at once.

    Long work waits for long work alone: short work has threads of its own. Those who ask take
    turns. What is given up before it begins is left out.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(THREADS.short_threads, "short texts")
        self._short_turns = Turns(THREADS.short_threads)
        self._long = ThreadPoolExecutor(THREADS.long_threads, "long texts")
        self._long_turns = Turns(THREADS.long_threads)

    async def run(self, size: int, work: Callable[[], T], who: str = "") -> T:
        """What ``work()`` for ``who`` returns or raises; ``size`` in characters or log
        probabilities.

        Work of no size is done at once.
        """
        if not size:
            return work()
        is_long = size >= THREADS.long_size
        turns = self._long_turns if is_long else self._short_turns
        await turns.take(who, None, lambda: False)
        try:
            pool = self._long if is_long else self._short
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        finally:
            turns.give_back(who)
