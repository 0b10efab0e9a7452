"""The virtual clock: jumps, limits, deadlocks."""

import asyncio
import random
import secrets
import time
from contextlib import suppress

import pytest

from dht.identity.peer_id import Identity
from testing.clock import VirtualClockLoop, run_virtual


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


def test_work_for_threads_takes_no_virtual_time_and_keeps_its_place() -> None:
    def slow(number: int) -> int:
        time.sleep(0.05 / number)
        return number

    def broken() -> None:
        raise ValueError("broken")

    async def body() -> tuple[list[int], float]:
        done: list[int] = []

        async def work(number: int) -> None:
            done.append(await asyncio.to_thread(slow, number))

        await asyncio.gather(work(1), work(2), work(3))
        with pytest.raises(ValueError, match="broken"):
            await asyncio.to_thread(broken)
        return done, asyncio.get_running_loop().time()

    assert run_virtual(body(), limit_s=1) == ([1, 2, 3], 0.0)
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        assert runner.run(body()) == ([1, 2, 3], 0.0)


def test_what_the_system_draws_is_the_same_in_every_run() -> None:
    async def body() -> tuple[str, str, int, float]:
        drawn = Identity.generate().peer_id, secrets.token_hex(8), secrets.randbelow(1 << 40)
        return *drawn, random.random()

    first = run_virtual(body(), limit_s=1)
    outside = secrets.token_hex(8)
    assert run_virtual(body(), limit_s=1) == first
    assert secrets.token_hex(8) not in {outside, first[1]}


def test_tasks_are_cancelled_in_the_order_in_which_they_were_made() -> None:
    async def body() -> list[int]:
        ended: list[int] = []

        async def wait(number: int) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(number)

        with suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                for number in range(50):
                    group.create_task(wait(number))
                await asyncio.sleep(1)
                raise ValueError("the group ends its tasks, which it keeps in a set")
        return ended

    assert run_virtual(body(), limit_s=10) == list(range(50))
