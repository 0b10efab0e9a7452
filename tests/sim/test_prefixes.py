"""What stages keep of earlier sessions: later ones run what is new, and answer the same."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from client import UnavailableError
from client.swarm.swarm import Swarm
from dht.messages import codec
from dht.messages.prefix import BLOCK_TOKENS, SHARED_KEY, block_names
from dht.messages.session import Prompt, SessionAccepted, SessionFailed, SessionRefused
from dht.transport.interface import SESSION_PROTOCOL
from testing.clock import run_virtual
from tests.sim.paper_swarm import PaperSwarm, answer_of, paper_swarm
from tests.sim.test_hostile import open_for
from tests.sim.test_sessions import held, owner, until

pytestmark = pytest.mark.sim

SPANS = ((0, 3), (3, 6), (6, 8))
HISTORY = tuple(range(100, 400))
NEW = 40
FOUND = 288
"""Tokens of the history in whole blocks."""


def rows(swarm: PaperSwarm) -> list[int]:
    """Rows that each peer ran since this was asked last."""
    found = [peer.engine.rows_run for peer in swarm.peers]
    for peer in swarm.peers:
        peer.engine.rows_run = 0
    return found


async def ask(swarm: PaperSwarm, client: Swarm, prompt: tuple[int, ...], **options: Any) -> int:
    """Ask for an answer, check it, and wait until all is freed; returns the cached tokens."""
    answer = await client.generate(prompt, max_new_tokens=NEW, **options)
    assert answer.token_ids == answer_of(prompt, NEW)
    await until(lambda: held(swarm) == 0)
    return answer.cached_tokens


def virtual(scenario: Callable[[], Awaitable[None]]) -> None:
    run_virtual(scenario(), limit_s=600)  # type: ignore[arg-type]


def test_turns_of_a_chat_run_what_is_new() -> None:
    async def scenario() -> None:
        async with paper_swarm(*SPANS) as swarm, swarm.client() as client:
            prompt = HISTORY[:200]
            assert await ask(swarm, client, prompt) == 0
            assert rows(swarm) == [len(prompt) + NEW - 1] * 3
            for turn in range(1, 4):
                said = answer_of(prompt, NEW)
                prompt = (*prompt, *said, *range(turn, turn + 20))
                cached = await ask(swarm, client, prompt)
                known = len(prompt) - 20 - 1  # the answer's last token was never run
                assert cached == known // BLOCK_TOKENS * BLOCK_TOKENS
                assert rows(swarm) == [len(prompt) - cached + NEW - 1] * 3
                for peer in swarm.peers:
                    assert peer.stage.counters["cached_tokens"] > 0

    virtual(scenario)


@pytest.mark.parametrize("new", [NEW, NEW + 1, NEW + 7, NEW + 12])
def test_a_turn_finds_the_rows_that_were_drafted_last(new: int) -> None:
    """Where an answer ends in a round with drafts, stages hear which of them were right."""

    async def scenario() -> None:
        async with paper_swarm(*SPANS, foretold=True) as swarm, swarm.client() as client:
            prompt = HISTORY[:200]
            answer = await client.generate(prompt, max_new_tokens=new)
            await until(lambda: held(swarm) == 0)
            assert sum(peer.stage.counters["accepted_drafts"] for peer in swarm.peers) > 0
            known = len(prompt) + new - 1
            prompt = (*prompt, *answer.token_ids, *range(20))
            again = await client.generate(prompt, max_new_tokens=NEW)
            assert again.token_ids == answer_of(prompt, NEW)
            assert again.cached_tokens == known // BLOCK_TOKENS * BLOCK_TOKENS

    virtual(scenario)


def test_a_clients_salts_and_other_clients_find_nothing() -> None:
    async def scenario() -> None:
        async with paper_swarm(*SPANS) as swarm, swarm.client() as one, swarm.client() as other:
            prompt = HISTORY
            assert await ask(swarm, one, prompt, cache_salt="a") == 0
            assert await ask(swarm, other, prompt, cache_salt="a") == 0
            assert await ask(swarm, one, prompt, cache_salt="b") == 0
            assert await ask(swarm, one, prompt, prefix_cache="off") == 0
            assert await ask(swarm, one, prompt, prefix_cache="shared") == 0
            assert await ask(swarm, one, prompt, cache_salt="a") == FOUND
            assert await ask(swarm, other, prompt, prefix_cache="shared") == FOUND
            assert await ask(swarm, one, prompt, prefix_cache="off") == 0

    virtual(scenario)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_after_a_stage_is_lost_between_turns_later_stages_go_on_from_what_they_keep(
    stage: int,
) -> None:
    async def scenario() -> None:
        async with paper_swarm(*SPANS) as swarm, swarm.client() as client:
            await ask(swarm, client, HISTORY)
            lost = swarm.peers[stage]
            spare = await swarm.add(*lost.engine.span)
            swarm.kill(lost)
            rows(swarm)
            await ask(swarm, client, HISTORY)
            ran = {peer.peer_id: n for peer, n in zip(swarm.peers, rows(swarm), strict=True)}
            whole = len(HISTORY) + NEW - 1
            for at, peer in enumerate(swarm.peers[:3]):
                if peer is not lost:
                    assert ran[peer.peer_id] == (whole if at < stage else whole - FOUND)
            assert ran[spare.peer_id] == whole
            assert await ask(swarm, client, HISTORY) == FOUND

    virtual(scenario)


@pytest.mark.parametrize("way", ["kill", "freeze"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_lost_within_an_answer_costs_no_token(way: str, stage: int) -> None:
    """The others have no log of what they found kept: it is made again as far as it is needed."""

    async def scenario() -> None:
        async with paper_swarm(*SPANS, *SPANS) as swarm, swarm.client() as client:
            await ask(swarm, client, HISTORY)
            running = client.begin(HISTORY, max_new_tokens=60)
            tokens: list[int] = []
            lost = False
            async for piece in running:
                tokens += piece.token_ids
                if len(tokens) >= 20 and not lost:
                    lost = True
                    getattr(swarm, way)(owner(swarm, running.route[stage].peer_id))
            assert tuple(tokens) == answer_of(HISTORY, 60)
            assert running.cached_tokens == FOUND
            assert running.answer().failovers == 1

    virtual(scenario)


def test_the_route_that_has_the_history_is_taken_again() -> None:
    async def scenario() -> None:
        async with paper_swarm(*SPANS, *SPANS) as swarm, swarm.client() as client:
            usual = (await client.generate((7,) * 40, max_new_tokens=1)).route
            await until(lambda: held(swarm) == 0)
            rooms = [owner(swarm, stage.peer_id).stage.kv.room for stage in usual]
            for room in rooms:
                room.pages = 0
            first = await client.generate(HISTORY, max_new_tokens=NEW)
            assert not set(first.route) & set(usual)
            for room in rooms:
                room.pages = 10_000
            await asyncio.sleep(60)  # it is announced, and nobody is avoided any more
            for _ in range(3):
                again = await client.generate(HISTORY, max_new_tokens=NEW)
                assert (again.route, again.cached_tokens) == (first.route, FOUND)
            assert (await client.generate((8,) * 40, max_new_tokens=1)).route == usual
            await until(lambda: held(swarm) == 0)
            for stage in first.route:  # a full one is not waited for
                owner(swarm, stage.peer_id).stage.kv.room.pages = 0
            elsewhere = await client.generate(HISTORY, max_new_tokens=NEW)
            assert elsewhere.token_ids == first.token_ids
            assert elsewhere.route == usual

    virtual(scenario)


def test_a_shared_prompt_that_lies_ends_at_the_first_stage() -> None:
    """A client names the blocks of a public prompt and sends another: it harms nobody."""

    async def scenario() -> None:
        async with paper_swarm(*SPANS) as swarm, swarm.client() as honest:
            liar = swarm.network.transport()
            names = block_names(SHARED_KEY, HISTORY)
            open_ = open_for(
                swarm,
                liar,
                prompt_tokens=len(HISTORY),
                blocks=b"".join(names),
                shares_prefix=True,
            )
            stream = await liar.open_stream(swarm.peers[0].peer_id, SESSION_PROTOCOL)
            await codec.send_frame(stream, open_)
            assert isinstance((await codec.read_frame(stream)).message, SessionAccepted)
            for at, ids in ((0, HISTORY[:20]), (20, (1,) * 280)):  # true at first
                await codec.send_frame(
                    stream, Prompt(session=open_.session, attempt=0, position=at, token_ids=ids)
                )
            told = (await codec.read_frame(stream)).message
            assert isinstance(told, SessionFailed)
            assert "not the one" in told.reason
            assert swarm.peers[0].stage.counters["misnamed"] == 1
            await stream.close()
            await until(lambda: held(swarm) == 0)
            assert rows(swarm)[0] <= 32, "what is not named truly never runs"
            assert await ask(swarm, honest, HISTORY, prefix_cache="shared") <= 16
            assert await ask(swarm, honest, HISTORY, prefix_cache="shared") == FOUND

    virtual(scenario)


def test_names_beyond_the_prompt_are_refused() -> None:
    async def scenario() -> None:
        async with paper_swarm(*SPANS) as swarm:
            client = swarm.network.transport()
            for blocks in (bytes(16), bytes(15)):
                open_ = open_for(swarm, client, prompt_tokens=10, blocks=blocks)
                stream = await client.open_stream(swarm.peers[0].peer_id, SESSION_PROTOCOL)
                await codec.send_frame(stream, open_)
                assert isinstance((await codec.read_frame(stream)).message, SessionRefused)
                await stream.close()

    virtual(scenario)


def test_a_first_stage_that_accepts_beyond_the_prompt_is_given_up() -> None:
    async def scenario() -> None:
        async with paper_swarm((0, 8)) as swarm, swarm.client(wait_s=5.0) as client:
            flow = swarm.peers[0].stage
            flow.shell._accept = lambda live: live.upstream.send(  # type: ignore[method-assign]
                SessionAccepted(
                    session=live.session.open.session,
                    attempt=live.session.open.attempt,
                    position=live.session.open.prompt_tokens + 1,
                )
            )
            with pytest.raises(UnavailableError):
                await client.generate(HISTORY, max_new_tokens=NEW)

    virtual(scenario)


def test_a_peer_that_keeps_nothing_is_served_as_before() -> None:
    async def scenario() -> None:
        async with paper_swarm(*SPANS) as swarm, swarm.client() as client:
            swarm.peers[1].engine.keeps = False
            for _ in range(2):
                assert await ask(swarm, client, HISTORY) == 0
            assert rows(swarm)[2] == 2 * (len(HISTORY) + NEW - 1) - FOUND, "the last one goes on"

    virtual(scenario)
