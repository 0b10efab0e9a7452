"""The loop that commands run on tells short times apart."""

import asyncio

from dht.command_line import loop_factory


def test_the_loops_clock_moves_within_a_millisecond() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        seen = {loop.time() for _ in range(1000)}
        assert len(seen) > 2, "the clock stands still between two looks of the loop"
        started_s = loop.time()
        await asyncio.sleep(0.02)
        assert loop.time() - started_s >= 0.019
        done = loop.create_future()
        loop.call_at(loop.time() + 0.02, done.set_result, None)
        await done
        assert loop.time() - started_s >= 0.038

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())
