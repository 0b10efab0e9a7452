"""The virtual clock: jumps, limits, deadlocks."""

import asyncio

import pytest

from dht.virtual_time import VirtualClockLoop, run_virtual


def test_days_pass_at_once() -> None:
    async def body() -> list[float]:
        loop = asyncio.get_running_loop()
        times = []
        for pause_s in (0.0, 1e-3, 1.0, 86400.0, 86400.0 * 365, 1e-3):
            await asyncio.sleep(pause_s)
            times.append(loop.time())
        return times

    times = run_virtual(body(), limit_s=1e9)  # no test has a real year
    year_s = 86400.0 * 366
    assert times == pytest.approx([0.0, 0.001, 1.001, 86401.001, year_s + 1.001, year_s + 1.002])


def test_timers_run_in_their_order() -> None:
    async def wait(pause_s: float, order: list[float]) -> None:
        await asyncio.sleep(pause_s)
        order.append(pause_s)

    async def body() -> list[float]:
        order: list[float] = []
        async with asyncio.TaskGroup() as group:
            for pause_s in (3.0, 1.0, 2.0, 0.0):
                group.create_task(wait(pause_s, order))
        return order

    assert run_virtual(body(), limit_s=10) == [0.0, 1.0, 2.0, 3.0]


def test_timeouts_are_virtual() -> None:
    async def body() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(body(), limit_s=1000) == pytest.approx(100)


def test_a_deadlock_names_the_tasks() -> None:
    async def stuck() -> None:
        async with asyncio.timeout(None):
            await asyncio.Event().wait()

    async def body() -> None:
        timer = asyncio.get_running_loop().call_later(5, print)
        timer.cancel()  # a cancelled timer wakes nobody
        await asyncio.create_task(stuck(), name="the stuck one")

    with pytest.raises(RuntimeError, match=r"deadlock.*the stuck one at .*stuck"):
        run_virtual(body(), limit_s=10)


def test_the_limit_is_virtual_too() -> None:
    async def body() -> None:
        while True:  # noqa: ASYNC110  (a task that never ends is the point)
            await asyncio.sleep(86400)

    with pytest.raises(TimeoutError, match="8640000 virtual s"):
        run_virtual(body(), limit_s=100 * 86400)


def test_threads_are_waited_for() -> None:
    async def body() -> int:
        return await asyncio.to_thread(sum, [1, 2])

    assert run_virtual(body(), limit_s=1) == 3
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        assert runner.run(body()) == 3
