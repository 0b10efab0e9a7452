"""A swarm of full and light peers: the same answers, whoever serves and whoever asks.

The route is light, full, light: so rows pass between the two kinds both ways, and the ring between
two light peers.
"""

import asyncio
import json
from collections.abc import Iterator

import pytest

from client import GenerationOptions, Swarm
from dht.messages.types import NodeState
from testing.forked import forked
from testing.local_swarm import LocalSwarm
from testing.reference import Reference
from tests.e2e.conftest import MODEL
from tests.e2e.light import HIDING, PYTHON, needs_libp2p, run_light

pytestmark = [pytest.mark.e2e, needs_libp2p]
NEW_TOKENS = 24
SPANS = ("0:2", "2:5", "5:8")


@pytest.fixture(scope="module")
def mixed() -> Iterator[LocalSwarm]:
    """Two full peers that hold the middle, two light ones that hold the ends."""
    swarm = LocalSwarm(MODEL, extra=("--threads", "1"), start=forked)
    try:
        for name in ("full0", "full1"):
            swarm.start_peer(name=name, extra=("--layers", SPANS[1]))
        for name, span in (("light0", SPANS[0]), ("light1", SPANS[2])):
            swarm.start_peer(name=name, extra=("--layers", span), python=PYTHON, environment=HIDING)
        swarm.wait_serving()
        yield swarm
    finally:
        swarm.stop()


def asked(swarm: LocalSwarm, *arguments: str) -> dict[str, object]:
    """What ``client.generate --json`` says in a light process."""
    command = ["client.generate", "--initial-peers", *swarm.addresses[:2], "--json"]
    options = ("--model", str(MODEL), "--max-new-tokens", str(NEW_TOKENS))
    answer: dict[str, object] = json.loads(run_light([*command, *options, *arguments]))
    return answer


def prompt_ids(reference: Reference, length: int) -> tuple[int, ...]:
    return tuple(reference.encode("Once upon a time a small otter found a blue boat. " * 30))[
        :length
    ]


@pytest.mark.parametrize("length", [1, 7, 300])
def test_a_light_client_gets_what_transformers_says(
    mixed: LocalSwarm, reference: Reference, length: int
) -> None:
    prompt = prompt_ids(reference, length)
    answer = asked(mixed, "--prompt-ids", ",".join(map(str, prompt)))
    assert answer["token_ids"] == list(reference.greedy(prompt, NEW_TOKENS)[0])
    light = {peer.peer_id for peer in mixed.peers if peer.name.startswith("light")}
    route = answer["route"]
    assert isinstance(route, list)
    assert {stage["peer"] for stage in route} >= light


def test_a_light_and_a_full_client_get_the_same_sampled_answer(
    mixed: LocalSwarm, reference: Reference
) -> None:
    prompt = prompt_ids(reference, 40)
    options = GenerationOptions(max_new_tokens=NEW_TOKENS, temperature=0.9, top_p=0.9, seed=5)

    async def ask() -> tuple[int, ...]:
        async with Swarm.connect(mixed.addresses[:1], model=str(MODEL)) as client:
            return (await client.generate(prompt, options)).token_ids

    ids, sampling = ",".join(map(str, prompt)), ("--temperature", "0.9", "--top-p", "0.9")
    light = asked(mixed, "--prompt-ids", ids, *sampling, "--seed", "5")
    assert light["token_ids"] == list(asyncio.run(ask()))


def test_many_answers_at_once_through_light_peers(mixed: LocalSwarm, reference: Reference) -> None:
    prompts = [prompt_ids(reference, 3 + 20 * number) for number in range(8)]

    async def ask() -> list[tuple[int, ...]]:
        async with Swarm.connect(mixed.addresses[:1], model=str(MODEL)) as client:
            answers = await asyncio.gather(
                *(client.generate(prompt, max_new_tokens=NEW_TOKENS) for prompt in prompts)
            )
            return [answer.token_ids for answer in answers]

    expected = [tuple(reference.greedy(prompt, NEW_TOKENS)[0]) for prompt in prompts]
    assert asyncio.run(ask()) == expected


def test_light_peers_say_so_and_do_not_coordinate(mixed: LocalSwarm) -> None:
    async def look() -> dict[str, bool]:
        async with Swarm.connect(mixed.addresses[:1], model=str(MODEL)) as client:
            assert all(node.state is NodeState.SERVING for node in client.view.nodes.values())
            return {peer_id: node.light for peer_id, node in client.view.nodes.items()}

    expected = {peer.peer_id: peer.name.startswith("light") for peer in mixed.peers}
    assert asyncio.run(look()) == expected
    for peer in mixed.peers:
        assert peer.wait_for("reach", 60)["reach"] == "direct", (
            "light and full dial each other back"
        )
        elected = peer.find("coordinator")
        assert elected is not None
        assert not expected[str(elected["peer_id"])]


def test_a_light_peer_cannot_found_a_swarm_or_be_joined_through(mixed: LocalSwarm) -> None:
    light = next(peer for peer in mixed.peers if peer.name == "light0")
    command = ["client.generate", "--model", str(MODEL), "--prompt", "One"]
    with pytest.raises(AssertionError, match="joins through the address of one that has it"):
        run_light([*command, "--initial-peers", light.address])
    identity = str(mixed.directory / "founder.key")
    join = ["node.join", "--model", str(MODEL), "--cpu", "--identity", identity]
    with pytest.raises(AssertionError, match="cannot found a swarm"):
        run_light(join)


def test_light_peers_leave_in_order_and_never_loaded_the_daemon_s_libraries(
    mixed: LocalSwarm,
) -> None:
    for peer in mixed.peers:
        if peer.name.startswith("light"):
            assert peer.stop() == 0, peer.tail()
            assert peer.find("left") is not None
