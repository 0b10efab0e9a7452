"""A swarm with more to do than it can: it says so at once, loses nothing and gets on."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from client import Swarm, UnavailableError
from coordinator.policies.admission.config import ADMISSION
from testing.clock import run_virtual
from tests.sim.paper_swarm import VOCAB, PaperSwarm, answer_of, paper_swarm
from tests.sim.test_sessions import held, until

pytestmark = pytest.mark.sim

PROMPT = tuple(range(40))


async def small_swarm(swarm: PaperSwarm, kv_tokens: int = 200) -> None:
    for span in ((0, 4), (4, 8)):
        await swarm.add(*span, kv_tokens=kv_tokens)


@pytest.mark.virtual(limit_s=600)
async def test_a_full_swarm_says_so_at_once_and_when_to_come_back() -> None:
    async with paper_swarm() as swarm:
        await small_swarm(swarm)
        loop = asyncio.get_running_loop()
        async with swarm.client() as busy, swarm.client(wait_s=0) as late:
            tasks = [
                asyncio.create_task(busy.generate(PROMPT, max_new_tokens=50)) for _ in range(2)
            ]
            await asyncio.sleep(0.5)
            asked_s = loop.time()
            with pytest.raises(UnavailableError, match=r"full.*try again in about") as caught:
                await late.generate(PROMPT, max_new_tokens=50)
            assert loop.time() - asked_s < 0.1
            assert 0 < caught.value.retry_after_s < 10
            assert caught.value.missing == ()
            for task in tasks:
                assert (await task).token_ids == answer_of(PROMPT, 50)
            await asyncio.sleep(caught.value.retry_after_s)
            answer = await late.generate(PROMPT, max_new_tokens=50)
            assert answer.token_ids == answer_of(PROMPT, 50)


@pytest.mark.virtual(limit_s=3600)
async def test_prompts_wait_outside_where_more_of_them_would_only_wait_inside() -> None:
    """There is KV for all of them, but a step takes long and has room for few."""
    clients = 2 * ADMISSION.untried_sessions
    prompts = [tuple((n + at) % VOCAB for at in range(100)) for n in range(clients)]

    async with paper_swarm() as swarm:
        for span in ((0, 4), (4, 8)):
            await swarm.add(*span, kv_tokens=1000 * clients, step_s=0.2)
        most = 0

        async def ask(prompt: tuple[int, ...]) -> None:
            async with swarm.client(wait_s=3600) as client:
                answer = await client.generate(prompt, max_new_tokens=2)
                assert answer.token_ids == answer_of(prompt, 2)

        async def watch() -> None:
            nonlocal most
            while True:
                for peer in swarm.peers:
                    sessions = [live.session for live in peer.stage.shell.table]
                    running = [s for s in sessions if s.done_position < len(prompts[0])]
                    most = max(most, len(running))
                await asyncio.sleep(0.1)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(ask(prompt) for prompt in prompts))
        watching.cancel()
        # Each stage counts those whose rows wait there, or ran there of late.
        assert most <= 1.5 * ADMISSION.untried_sessions
        await until(lambda: held(swarm) == 0)


@pytest.mark.virtual(limit_s=600)
async def test_a_crowd_of_one_client_gets_in_as_fast_as_its_prompts_end() -> None:
    """Most are refused at first, as nobody knows yet how long they take; none waits long for it."""
    prompts = [tuple((n + at) % VOCAB for at in range(40)) for n in range(64)]
    assert len(prompts) > 3 * ADMISSION.untried_sessions

    async with paper_swarm() as swarm:
        for span in ((0, 4), (4, 8)):
            await swarm.add(*span, kv_tokens=100 * len(prompts), step_s=0.002)
        loop = asyncio.get_running_loop()
        async with swarm.client(wait_s=60) as client:
            begun_s, first_s = loop.time(), []

            async def ask(prompt: tuple[int, ...]) -> None:
                pieces = client.begin(prompt, max_new_tokens=20)
                await anext(aiter(pieces))
                first_s.append(loop.time() - begun_s)
                async for _ in pieces:
                    pass

            await asyncio.gather(*(ask(prompt) for prompt in prompts))
            assert client.view.counters["refused_too_many"] > ADMISSION.untried_sessions
        assert max(first_s) < ADMISSION.prompts_wait_s


def test_far_too_much_is_worked_off_and_nothing_leaks() -> None:
    async def scenario() -> tuple[float, float]:
        async with paper_swarm() as swarm:
            await small_swarm(swarm)
            loop = asyncio.get_running_loop()

            async def serve(clients: int) -> float:
                """Answers per second, each asked by a client of its own that comes back."""
                done = 0

                async def ask(number: int) -> None:
                    nonlocal done
                    prompt = tuple(range(number, number + 20))
                    async with swarm.client(wait_s=600) as client:
                        for _ in range(2):
                            answer = await client.generate(prompt, max_new_tokens=30)
                            assert answer.token_ids == answer_of(prompt, 30)
                            done += 1

                started_s = loop.time()
                await asyncio.gather(*(ask(number) for number in range(clients)))
                return done / (loop.time() - started_s)

            peak = await serve(4)
            await until(lambda: held(swarm) == 0)
            crowd = await serve(24)
            await until(lambda: held(swarm) == 0)
            assert all(peer.engine.kv_free == 200 for peer in swarm.peers)
            return peak, crowd

    peak, crowd = run_virtual(scenario(), limit_s=3600)
    assert crowd >= 0.8 * peak


@pytest.mark.virtual(limit_s=600)
async def test_peers_with_room_are_asked_first() -> None:
    async with paper_swarm((0, 4)) as swarm:
        await swarm.add(4, 8, kv_tokens=10)
        roomy = await swarm.add(4, 8)
        async with swarm.client() as client:
            for _ in range(4):
                answer = await client.generate(PROMPT, max_new_tokens=5)
                assert answer.route[-1].peer_id == roomy.peer_id
            assert not client.view.counters["refused_no_kv"]


@pytest.mark.virtual(limit_s=600)
async def test_urgent_requests_get_in_where_ordinary_ones_are_refused() -> None:
    async with paper_swarm() as swarm:
        await small_swarm(swarm, kv_tokens=400)
        async with AsyncExitStack() as stack:
            busy = [await stack.enter_async_context(swarm.client()) for _ in range(4)]
            late = await stack.enter_async_context(swarm.client(wait_s=0))
            tasks = [asyncio.create_task(each.generate(PROMPT, max_new_tokens=50)) for each in busy]
            await asyncio.sleep(0.5)
            with pytest.raises(UnavailableError, match="full"):
                await late.generate(PROMPT[:10], max_new_tokens=20)
            urgent = await late.generate(PROMPT[:10], max_new_tokens=20, priority="high")
            assert urgent.token_ids == answer_of(PROMPT[:10], 20)
            for task in tasks:
                assert (await task).token_ids == answer_of(PROMPT, 50)
        await until(lambda: held(swarm) == 0)


@pytest.mark.virtual(limit_s=600)
async def test_one_client_may_call_only_a_few_sessions_urgent() -> None:
    async with paper_swarm() as swarm:
        await small_swarm(swarm, kv_tokens=1000)
        async with swarm.client(wait_s=0) as greedy:
            tasks = [
                asyncio.create_task(greedy.generate(PROMPT, max_new_tokens=50, priority="high"))
                for _ in range(12)
            ]
            await asyncio.sleep(0.5)
            assert all(peer.stage.kv_tokens_free >= 100 for peer in swarm.peers)
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert sum(isinstance(each, UnavailableError) for each in done) == 2
        await until(lambda: held(swarm) == 0)


@pytest.mark.virtual(limit_s=3600)
async def test_ten_times_too_much_is_turned_away_at_once_and_costs_the_others_little() -> None:
    """Requests that do not wait arrive at ten times the rate that could be served."""
    new, clients, seconds, ramp_s = 30, 3, 9.0, 3.0
    prompt = PROMPT[:10]

    async with paper_swarm() as swarm:
        for span in ((0, 4), (4, 8)) * 2:
            await swarm.add(*span, kv_tokens=400)
        loop = asyncio.get_running_loop()

        async def peak() -> float:
            """Tokens per second of as many answers at once as there is room for."""
            came = 0
            until_s = loop.time() + 8.0

            async def ask() -> None:
                nonlocal came
                async with swarm.client() as client:
                    while loop.time() < until_s:
                        async for piece in client.begin(prompt, max_new_tokens=new):
                            within = until_s - 5.0 <= loop.time() < until_s
                            came += len(piece.token_ids) if within else 0

            await asyncio.gather(*(ask() for _ in range(16)))
            return came / 5.0

        peak_per_s = await peak()
        rejected_s: list[float] = []
        told_s: list[float] = []
        came_s: list[float] = []
        started_s, tasks = loop.time(), []

        async def ask(client: Swarm) -> None:
            asked_s, tokens_s = loop.time(), []
            try:
                async for piece in client.begin(prompt, max_new_tokens=new):
                    tokens_s += [loop.time() - started_s] * len(piece.token_ids)
            except UnavailableError as error:
                rejected_s.append(loop.time() - asked_s)
                told_s.append(error.retry_after_s)
            came_s.extend(tokens_s)

        async with AsyncExitStack() as stack:
            crowd = [
                await stack.enter_async_context(swarm.client(wait_s=0)) for _ in range(clients)
            ]
            started_s = loop.time()
            per_s = 10 * peak_per_s / new
            for number in range(int(per_s * seconds)):
                tasks.append(asyncio.create_task(ask(crowd[number % clients])))
                await asyncio.sleep(1 / per_s)
            await asyncio.gather(*tasks)
        served = sum(ramp_s <= at_s < seconds for at_s in came_s) / (seconds - ramp_s)
        assert served >= 0.9 * peak_per_s
        assert len(rejected_s) > 0.8 * len(tasks)
        assert max(rejected_s) <= 0.1
        assert all(0 < each <= 600 for each in told_s)
        refused = sum(peer.stage.counters["refused_no_kv"] for peer in swarm.peers)
        assert refused < 0.5 * len(rejected_s), "most are turned away without asking anyone"
        await until(lambda: held(swarm) == 0)
