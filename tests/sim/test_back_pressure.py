"""A slow stage slows the stages before it, and nobody's decodes."""

import asyncio
from dataclasses import replace

import pytest

from dht.transport.frame_sender import SENDING
from testing.clock import run_virtual
from testing.network import LinkModel
from testing.stand_in import Setting, StandInSwarm
from testing.timed_engine import GpuTimes

pytestmark = pytest.mark.sim

SLOW = GpuTimes(step_s=5e-3, decode_s=2e-5, prefill_s=5e-3)
"""Prefill of the middle stage: a hundred times slower than the others'."""


def test_prefill_waits_at_the_routes_head_and_not_before_the_slow_stage() -> None:
    async def scenario() -> None:
        setting = Setting(policy="anabranch", mbit=1000.0, delay_s=0.001)
        async with StandInSwarm(setting) as swarm:
            slow = swarm.peers[1]
            slow.engine._times = SLOW
            most = 0

            async def watch() -> None:
                nonlocal most
                while True:
                    most = max(most, slow.engine.backlog_tokens)
                    await asyncio.sleep(0.01)

            watching = asyncio.create_task(watch())
            prompts, each = 4, 1500
            answers = await asyncio.gather(
                *(
                    swarm.client.generate(
                        (1,) * each, max_new_tokens=4, ignore_eos=True, speculate=False
                    )
                    for _ in range(prompts)
                )
            )
            watching.cancel()
            assert all(len(answer.token_ids) == 4 for answer in answers)
            assert all(answer.failovers == 0 for answer in answers)
            # What the limit allows, and what was on its way when it was reached.
            assert 1024 < most < 3 * 1024 < prompts * each

    run_virtual(scenario(), limit_s=10_000)


def test_prefill_may_wait_longer_than_a_dead_link_for_a_slow_one_behind() -> None:
    async def scenario() -> None:
        setting = Setting(policy="anabranch", mbit=1000.0, delay_s=0.001)
        async with StandInSwarm(setting) as swarm:
            loop = asyncio.get_running_loop()
            _, middle, last = swarm.peers
            middle.engine._times = replace(setting.times, prefill_s=1e-3)
            uplink = LinkModel(delay_s=0.001, bandwidth_bytes_per_s=2e5, unread_bytes_max=4 << 20)
            swarm.network.set_link(middle.transport.peer_id, last.transport.peer_id, uplink)
            longest_s, since_s = 0.0, loop.time()

            async def watch() -> None:
                nonlocal longest_s, since_s
                while True:
                    if not middle.stage.pipeline.behind:
                        since_s = loop.time()
                    longest_s = max(longest_s, loop.time() - since_s)
                    await asyncio.sleep(0.05)

            watching = asyncio.create_task(watch())
            answers = await asyncio.gather(
                *(
                    swarm.client.generate(
                        (1,) * 800, max_new_tokens=2, ignore_eos=True, speculate=False
                    )
                    for _ in range(3)
                )
            )
            watching.cancel()
            assert longest_s > SENDING.stalled_s, "it was behind for longer than a dead link is"
            assert all(answer.failovers == 0 for answer in answers)
            assert all(len(answer.token_ids) == 2 for answer in answers)

    run_virtual(scenario(), limit_s=10_000)


@pytest.mark.virtual(limit_s=25)
async def test_decodes_go_on_while_a_link_has_more_than_enough_to_send() -> None:
    setting = Setting(policy="anabranch", mbit=1000.0, delay_s=0.001)
    async with StandInSwarm(setting) as swarm:
        pipeline = swarm.peers[0].stage.pipeline
        answer = swarm.client.begin((1,) * 64, max_new_tokens=20, ignore_eos=True, speculate=False)
        tokens = 0
        async for piece in answer:
            tokens += len(piece.token_ids)
            # From here on every link of the first stage has more waiting than it should.
            pipeline._config = replace(pipeline._config, queued_bytes_max=-1)
        assert tokens == 20
