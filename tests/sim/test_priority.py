"""High priority shortens the way to the first token, and costs others a bounded part of theirs."""

import asyncio
from typing import Literal

import pytest

from coordinator.policies.batching.scheduler import BATCHING, BatchLimits, Scheduler
from testing.clock import run_virtual
from testing.stand_in import Setting, StandInSwarm
from testing.timed_engine import GpuTimes

pytestmark = pytest.mark.sim

BUSY = GpuTimes(step_s=5e-3, decode_s=2e-5, prefill_s=1e-3)
LIMITS = BatchLimits(prefill_tokens_max=64)
PROMPTS, PROMPT_TOKENS = 24, 300
Kind = Literal["normal", "high"]


def first_tokens(priority: Kind) -> tuple[float, float]:
    """Seconds to the first token of an answer of ``priority`` that is asked for behind others, and
    to the last of the others' first tokens."""

    async def scenario() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        setting = Setting(policy="anabranch", mbit=1000.0, delay_s=0.001)
        async with StandInSwarm(setting) as swarm:
            for peer in swarm.peers:
                peer.engine._times, peer.engine._scheduler = BUSY, Scheduler(LIMITS)

            async def first_s(priority: Kind) -> float:
                began_s, came_s, tokens = loop.time(), 0.0, 0
                asked = swarm.client.begin(
                    (1,) * PROMPT_TOKENS,
                    max_new_tokens=4,
                    ignore_eos=True,
                    priority=priority,
                    speculate=False,
                )
                async for piece in asked:
                    came_s = came_s or loop.time()
                    tokens += len(piece.token_ids)
                assert (tokens, asked.answer().failovers) == (4, 0)
                return came_s - began_s

            others = [asyncio.create_task(first_s("normal")) for _ in range(PROMPTS)]
            await asyncio.sleep(0.5)
            return await first_s(priority), max(await asyncio.gather(*others))

    return run_virtual(scenario(), limit_s=10_000)


def test_an_urgent_prompt_passes_those_before_it() -> None:
    normal_s, others_s = first_tokens("normal")
    high_s, delayed_s = first_tokens("high")
    assert high_s < normal_s / 2
    assert delayed_s < (BATCHING.urgent_steps + 1) * others_s
