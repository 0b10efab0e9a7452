"""Where the time of a token went: what stages say, and what a client makes of it."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from client import Answer
from client.generate import figures
from dht.messages.session import SESSION_BOUNDS, Tokens
from testing.clock import run_virtual
from testing.stand_in import Setting, StandInSwarm

STEP_S = 0.02
DELAY_S = 0.03
SETTING = Setting(policy="anabranch", delay_s=DELAY_S, gpu_step_s=STEP_S)


async def answers(count: int, apart_s: float = 0.0) -> list[Answer]:
    """Answers of 40 tokens, asked for ``apart_s`` one after the other."""

    async def ask(swarm: StandInSwarm, at_s: float) -> Answer:
        await asyncio.sleep(at_s)
        return await swarm.client.generate(
            (1,) * 64, max_new_tokens=40, ignore_eos=True, speculate=False
        )

    async with StandInSwarm(SETTING) as swarm:
        return list(
            await asyncio.gather(*(ask(swarm, apart_s * number) for number in range(count)))
        )


def test_a_lone_tokens_time_is_steps_and_links() -> None:
    [answer] = run_virtual(answers(1), limit_s=1000)
    assert answer.computed_s == pytest.approx(3 * STEP_S, rel=0.05)
    assert answer.waited_s == pytest.approx(0.0, abs=1e-3)
    assert answer.way_s == pytest.approx(3 * DELAY_S, rel=0.1)
    told = f"of {1000 * answer.tpot_s:.0f} ms per token"
    assert told in figures(answer, {})
    assert told not in figures(replace(answer, computed_s=0.0, waited_s=0.0), {})


def test_who_comes_between_the_steps_of_others_waits() -> None:
    found = run_virtual(answers(12, STEP_S / 5), limit_s=1000)
    assert max(answer.waited_s for answer in found) > STEP_S / 4
    assert all(answer.computed_s + answer.waited_s <= answer.tpot_s + 1e-9 for answer in found)


def test_a_last_stage_that_claims_hours_is_believed_no_more_than_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def boast(**fields: Any) -> Tokens:
        return Tokens(
            **fields
            | {"computed_s": SESSION_BOUNDS.step_s_max, "waited_s": SESSION_BOUNDS.step_s_max}
        )

    monkeypatch.setattr("node.sessions.session_table.Tokens", boast)
    [answer] = run_virtual(answers(1), limit_s=1000)
    assert answer.computed_s == answer.tpot_s > 0
    assert answer.waited_s == 0
