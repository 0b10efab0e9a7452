"""Threads for what takes long with text, so that the gateway's event loop goes on meanwhile."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

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

    Long work waits for long work alone: short work has threads of its own. What is given up before
    it begins is left out.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(THREADS.short_threads, "short texts")
        self._long = ThreadPoolExecutor(THREADS.long_threads, "long texts")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """What ``work()`` returns or raises; ``size`` in characters or log probabilities.

        Work of no size is done at once.
        """
        if not size:
            return work()
        pool = self._long if size >= THREADS.long_size else self._short
        return await asyncio.get_running_loop().run_in_executor(pool, work)
