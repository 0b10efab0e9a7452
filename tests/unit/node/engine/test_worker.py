"""The engine's thread: order, calls between steps, failures, the end."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from coordinator.policies.batching.scheduler import BatchLimits
from node.engine.work_item import WorkItem, WorkResult
from node.engine.worker import Worker


def item(session: str, number: int, tokens: int = 1) -> WorkItem:
    """Work that its ``number`` tells apart."""
    return WorkItem(session=session, start=0, end=1, position=number, token_ids=(1,) * tokens)


class Bench:
    """A worker whose steps wait for ``gate`` and echo their work."""

    def __init__(self, gated: bool = False) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        if not gated:
            self.gate.set()
        self.threads: set[int] = set()
        self.results: asyncio.Queue[WorkResult] = asyncio.Queue()
        self.worker = Worker(self.step, self.take, BatchLimits())

    def step(self, batch: Sequence[WorkItem]) -> list[WorkResult]:
        self.entered.set()
        self.gate.wait()
        if any(work.position < 0 for work in batch):
            raise RuntimeError("no luck")
        return [WorkResult(item=work, token_ids=(7,)) for work in batch]

    def take(self, results: Sequence[WorkResult]) -> None:
        self.threads.add(threading.get_ident())
        for result in results:
            self.results.put_nowait(result)

    async def next(self) -> WorkResult:
        async with asyncio.timeout(60):
            return await self.results.get()


async def test_results_arrive_on_the_loop_in_the_order_of_submission() -> None:
    bench = Bench()
    sent = [item("a", n, tokens=1 + n % 3) for n in range(30)]
    for work in sent:
        bench.worker.submit(work)
    got = [await bench.next() for _ in sent]
    assert [(result.item, result.token_id) for result in got] == [(work, 7) for work in sent]
    assert bench.threads == {threading.get_ident()}
    assert bench.worker.times.steps == 30
    assert bench.worker.times.tokens == sum(work.tokens for work in sent)
    bench.worker.stop()


async def test_what_is_submitted_together_runs_in_one_step() -> None:
    bench = Bench()
    with bench.worker.together():
        for name in "abc":
            with bench.worker.together():  # a block within a block ends nothing
                bench.worker.submit(item(name, 1))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(bench.results.get(), 0.05)
        bench.worker.drop("b")
    assert {(await bench.next()).item.session for _ in range(2)} == {"a", "c"}
    assert bench.worker.times.steps == 1
    bench.worker.submit(item("d", 1))
    assert (await bench.next()).item.session == "d"
    bench.worker.stop()


async def test_calls_run_between_steps_in_the_workers_thread() -> None:
    bench = Bench(gated=True)
    bench.worker.submit(item("a", 1))
    await asyncio.to_thread(bench.entered.wait)
    call = asyncio.create_task(bench.worker.call(threading.get_ident))
    await asyncio.sleep(0)
    bench.worker.submit(item("a", 2))
    assert not call.done()
    bench.gate.set()
    async with asyncio.timeout(60):
        assert await call != threading.get_ident()
    assert [(await bench.next()).item.position for _ in range(2)] == [1, 2]
    with pytest.raises(ZeroDivisionError):
        await bench.worker.call(lambda: 1 // 0)
    assert await bench.worker.call(lambda: "alive") == "alive"
    bench.worker.stop()


async def test_a_step_that_raises_fails_its_items_and_no_others() -> None:
    bench = Bench(gated=True)
    bench.worker.submit(item("a", 1))
    await asyncio.to_thread(bench.entered.wait)
    bench.worker.submit(item("a", -1))
    bench.worker.submit(item("b", 2))
    bench.worker.submit(item("b", 3))
    bench.gate.set()
    assert (await bench.next()).error is None
    failed = [await bench.next() for _ in range(2)]
    assert [(result.item, result.error) for result in failed] == [
        (item("a", -1), "the engine's step failed: no luck"),
        (item("b", 2), "the engine's step failed: no luck"),
    ]
    assert (await bench.next()) == WorkResult(item=item("b", 3), token_ids=(7,))
    bench.worker.stop()


async def test_dropped_work_is_forgotten() -> None:
    bench = Bench(gated=True)
    bench.worker.submit(item("a", 1))
    await asyncio.to_thread(bench.entered.wait)
    for number in range(2, 5):
        bench.worker.submit(item("a", number))
    bench.worker.submit(item("b", 9))
    bench.worker.drop("a")
    bench.worker.drop("unknown")
    bench.gate.set()
    assert [(await bench.next()).item for _ in range(2)] == [item("a", 1), item("b", 9)]
    await bench.worker.call(lambda: None)
    assert bench.results.empty()
    bench.worker.stop()


async def test_stop_joins_and_fails_what_is_called_after_it() -> None:
    bench = Bench(gated=True)
    bench.worker.submit(item("a", 1))
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


async def test_a_step_that_never_ends_does_not_keep_the_process_from_ending() -> None:
    bench = Bench(gated=True)
    bench.worker.submit(item("a", 1))
    await asyncio.to_thread(bench.entered.wait)
    bench.worker.stop(limit_s=0.0)
    bench.gate.set()
    assert (await bench.next()).item.session == "a"
