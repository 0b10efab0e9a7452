"""What a client finds out about the time of a token, and about its own sessions' places."""

import asyncio

import pytest

from client.view.view import SwarmView
from coordinator.policies.routing.affinity import Route
from tests.sim.paper_swarm import PaperSwarm, answer_of, paper_swarm

pytestmark = pytest.mark.sim

PROMPT = tuple(range(20))
STEP_S = 0.01


class Watched:
    """What a view is told of tokens' times."""

    def __init__(self, view: SwarmView) -> None:
        self.took: list[tuple[Route, float]] = []
        self._tell = view.took
        view.took = self  # type: ignore[method-assign, assignment]

    def __call__(self, route: Route, expected_s: float, token_s: float, now_s: float) -> None:
        self.took.append((route, token_s))
        self._tell(route, expected_s, token_s, now_s)


def sessions(swarm: PaperSwarm, view: SwarmView) -> list[int]:
    """This client's sessions at each peer, as it counts them."""
    beside = view.own.beside()
    return [beside.get(peer.peer_id, 0) for peer in swarm.peers]


@pytest.mark.virtual(limit_s=600)
async def test_who_reads_slowly_does_not_hold_that_against_the_peers() -> None:
    async with paper_swarm((0, 4), (4, 8)) as swarm, swarm.client() as client:
        watched = Watched(client.view)
        answer = []
        async for piece in client.stream(PROMPT, max_new_tokens=30):
            answer += piece.token_ids
            await asyncio.sleep(1.0)
        assert tuple(answer) == answer_of(PROMPT, 30)
        ((_, token_s),) = watched.took
        assert 2 * STEP_S <= token_s < 4 * STEP_S


@pytest.mark.virtual(limit_s=600)
async def test_a_session_that_fails_over_is_judged_and_counted_on_each_of_its_routes() -> None:
    async with paper_swarm((0, 4), (4, 8), (4, 8)) as swarm, swarm.client() as client:
        watched = Watched(client.view)
        tokens = []
        async for piece in client.stream(PROMPT, max_new_tokens=60):
            tokens += piece.token_ids
            if len(tokens) == 30:
                assert sorted(sessions(swarm, client.view)) == [0, 1, 1]
                (at,) = (n for n in (1, 2) if sessions(swarm, client.view)[n])
                swarm.kill(swarm.peers[at])
        assert tuple(tokens) == answer_of(PROMPT, 60)
        (before, _), (after, _) = watched.took
        assert before[0] == after[0]
        assert before[1].peer_id == swarm.peers[at].peer_id != after[1].peer_id
        await asyncio.sleep(20.0)
        assert sessions(swarm, client.view) == [0, 0, 0]


@pytest.mark.virtual(limit_s=600)
async def test_a_request_that_is_cancelled_counts_nowhere() -> None:
    async with paper_swarm((0, 8)) as swarm, swarm.client() as client:
        task = asyncio.create_task(client.generate(PROMPT, max_new_tokens=60))
        await asyncio.sleep(5 * STEP_S)
        assert sessions(swarm, client.view) == [1]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert sessions(swarm, client.view) == [0]
