"""The engine's thread: order, calls between steps, failures, the end."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from node.engine.scheduler import BatchLimits
from node.engine.worker import Worker


@dataclass(frozen=True)
class Work:
    key: str
    number: int
    tokens: int = 1
    background: bool = False


class Bench:
    """A worker whose steps wait for ``gate`` and echo their work."""

    def __init__(self, gated: bool = False) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        if not gated:
            self.gate.set()
        self.threads: set[int] = set()
        self.results: asyncio.Queue[tuple[Work, str]] = asyncio.Queue()
        self.worker = Worker(self.step, self.take, self.failed, BatchLimits())

    def step(self, batch: Sequence[Work]) -> list[tuple[Work, str]]:
        self.entered.set()
        self.gate.wait()
        if any(work.number < 0 for work in batch):
            raise RuntimeError("no luck")
        return [(work, "done") for work in batch]

    def take(self, results: Sequence[tuple[Work, str]]) -> None:
        self.threads.add(threading.get_ident())
        for result in results:
            self.results.put_nowait(result)

    @staticmethod
    def failed(work: Work, error: Exception) -> tuple[Work, str]:
        return work, str(error)

    async def next(self) -> tuple[Work, str]:
        async with asyncio.timeout(60):
            return await self.results.get()


def test_results_arrive_on_the_loop_in_the_order_of_submission() -> None:
    async def run() -> None:
        bench = Bench()
        sent = [Work("a", n, tokens=1 + n % 3) for n in range(30)]
        for work in sent:
            bench.worker.submit(work)
        assert [await bench.next() for _ in sent] == [(work, "done") for work in sent]
        assert bench.threads == {threading.get_ident()}
        assert bench.worker.times.steps == 30
        assert bench.worker.times.tokens == sum(work.tokens for work in sent)
        bench.worker.stop()

    asyncio.run(run())


def test_calls_run_between_steps_in_the_workers_thread() -> None:
    async def run() -> None:
        bench = Bench(gated=True)
        bench.worker.submit(Work("a", 1))
        await asyncio.to_thread(bench.entered.wait)
        call = asyncio.create_task(bench.worker.call(threading.get_ident))
        await asyncio.sleep(0)
        bench.worker.submit(Work("a", 2))
        assert not call.done()
        bench.gate.set()
        async with asyncio.timeout(60):
            assert await call != threading.get_ident()
        assert [(await bench.next())[0].number for _ in range(2)] == [1, 2]
        with pytest.raises(ZeroDivisionError):
            await bench.worker.call(lambda: 1 // 0)
        assert await bench.worker.call(lambda: "alive") == "alive"
        bench.worker.stop()

    asyncio.run(run())


def test_a_step_that_raises_fails_its_items_and_no_others() -> None:
    async def run() -> None:
        bench = Bench(gated=True)
        bench.worker.submit(Work("a", 1))
        await asyncio.to_thread(bench.entered.wait)
        bench.worker.submit(Work("a", -1))
        bench.worker.submit(Work("b", 2))
        bench.worker.submit(Work("b", 3))
        bench.gate.set()
        got = {(await bench.next())[1] for _ in range(1)}
        assert got == {"done"}
        failed = dict([await bench.next() for _ in range(2)])
        assert failed == {Work("a", -1): "no luck", Work("b", 2): "no luck"}
        assert await bench.next() == (Work("b", 3), "done")
        bench.worker.stop()

    asyncio.run(run())


def test_dropped_work_is_forgotten() -> None:
    async def run() -> None:
        bench = Bench(gated=True)
        bench.worker.submit(Work("a", 1))
        await asyncio.to_thread(bench.entered.wait)
        for number in range(2, 5):
            bench.worker.submit(Work("a", number))
        bench.worker.submit(Work("b", 9))
        bench.worker.drop("a")
        bench.worker.drop("unknown")
        bench.gate.set()
        assert [(await bench.next())[0] for _ in range(2)] == [Work("a", 1), Work("b", 9)]
        await bench.worker.call(lambda: None)
        assert bench.results.empty()
        assert bench.worker._submitted_s == {}
        bench.worker.stop()

    asyncio.run(run())


def test_stop_joins_and_fails_what_is_called_after_it() -> None:
    async def run() -> None:
        bench = Bench(gated=True)
        bench.worker.submit(Work("a", 1))
        await asyncio.to_thread(bench.entered.wait)
        waiting = asyncio.create_task(bench.worker.call(lambda: None))
        await asyncio.sleep(0)
        threading.Timer(0.05, bench.gate.set).start()
        bench.worker.stop()
        assert not bench.worker._thread.is_alive()
        async with asyncio.timeout(60):
            with pytest.raises(RuntimeError, match="stopped"):
                await waiting
            with pytest.raises(RuntimeError, match="stopped"):
                await bench.worker.call(lambda: None)
        bench.worker.stop()

    asyncio.run(run())
