"""When a peer takes others not to see it, what it does, and what strangers can make it do."""

import asyncio
import io
import itertools
import math
from dataclasses import replace

import pytest

from dht.errors import MachineError
from dht.process.supervision import SERVICE_VARIABLE
from dht.transport.interface import Contact
from node.owner.reporter import Reporter
from node.peer.self_check import SelfCheck, SelfCheckConfig, SelfChecker, SelfFinding
from testing.clock import run_virtual

CONFIG = SelfCheckConfig()


def contact(returned_s: float, answered_s: float, called_s: float, others: int = 3) -> Contact:
    return Contact(returned_s=returned_s, answered_s=answered_s, called_s=called_s, others=others)


def looked(*signs: tuple[float, Contact], serves: bool = True) -> list[SelfFinding]:
    """What looks at these times found."""
    check = SelfCheck()
    return [check.look(seen, serves=serves, now_s=now_s) for now_s, seen in signs]


def test_a_peer_that_others_give_back_and_call_is_well() -> None:
    signs = [(now_s, contact(now_s - 20, now_s, now_s - 100)) for now_s in range(100, 1000, 5)]
    assert not any(each.trouble for each in looked(*signs))


def test_a_peer_that_is_alone_is_well() -> None:
    """Nobody was there, or all who were said that they leave."""
    signs = [(now_s, contact(90, 90, 90, others=0)) for now_s in range(100, 3000, 5)]
    assert not any(each.trouble for each in looked(*signs))


def test_a_peer_whose_record_nobody_gives_back_says_so_and_tries_again_and_again() -> None:
    signs = [(now_s, contact(100, now_s, now_s)) for now_s in range(100, 400, 5)]
    found = looked(*signs)
    first = next(n for n, each in enumerate(found) if each.trouble)
    assert signs[first][0] <= 100 + CONFIG.returned_s + 5
    tries = [signs[n][0] for n, each in enumerate(found) if each.attempt]
    assert tries[0] == signs[first][0]
    apart = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert set(apart) == {CONFIG.again_s}


def test_a_serving_peer_that_nobody_calls_is_deaf_and_a_spare_one_is_not() -> None:
    signs = [(now_s, contact(now_s, now_s, 100)) for now_s in range(100, 600, 5)]
    found = looked(*signs)
    assert "calls" in found[-1].trouble
    assert not found[int(CONFIG.called_s / 5) - 1].trouble
    assert not any(each.trouble for each in looked(*signs, serves=False))


@pytest.mark.parametrize("known", [True, False], ids=["known", "strangers"])
def test_strangers_neither_end_a_peer_nor_keep_one_that_is_cut_off(known: bool) -> None:
    """Its record is hidden. Whether peers with work here, or strangers alone, answer and call."""
    signs = [
        (now_s, replace(contact(100, now_s, now_s), known_s=now_s if known else 100.0))
        for now_s in range(100, 5000, 5)
    ]
    found = looked(*signs)
    assert found[-1].trouble
    assert any(each.silent for each in found) is not known


def test_a_peer_that_nobody_answers_says_so_within_15_s() -> None:
    signs = [(now_s / 2, contact(100, 100, 100)) for now_s in range(200, 260, 5)]
    first = next(
        now_s
        for (now_s, _), each in zip(signs, looked(*signs), strict=True)
        if "answers" in each.trouble
    )
    assert first <= 100 + 15 + CONFIG.look_s


def test_only_silence_is_left_to_a_new_start() -> None:
    signs = [(now_s, contact(100, 100, 100)) for now_s in range(100, 1000, 5)]
    silent = [now_s for (now_s, _), each in zip(signs, looked(*signs), strict=True) if each.silent]
    assert silent[0] == 100 + CONFIG.ends_s
    never = [(now_s, contact(-math.inf, 100, 100)) for now_s in range(100, 5000, 5)]
    found = looked(*never)
    assert found[-1].trouble
    assert not any(each.silent for each in found), "whom nobody ever saw, a new start helps little"


class Cut:
    """A transport that nobody answers any more."""

    def __init__(self) -> None:
        self.rejoined = 0
        self.now = contact(0, 0, 0)

    def contact(self) -> Contact:
        return self.now

    def rejoin(self) -> None:
        self.rejoined += 1


@pytest.mark.parametrize("service", ["", "1"])
def test_it_greets_announces_tells_its_owner_and_in_the_end_leaves_it_to_a_service(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SERVICE_VARIABLE, service)
    cut, said, announced = Cut(), io.StringIO(), []

    async def scenario() -> None:
        checker = SelfChecker(
            cut,  # type: ignore[arg-type]  what a check needs of a transport
            serves=lambda: True,
            again=lambda: announced.append(1),
            reporter=Reporter(json_log=False, out=said),
        )
        checking = asyncio.create_task(checker.run())
        await asyncio.sleep(2 * CONFIG.ends_s)
        if service:
            with pytest.raises(MachineError, match="nobody has answered"):
                await checking
            return
        assert checker.trouble
        cut.now = contact(601, 601, 601)
        await asyncio.sleep(2 * CONFIG.look_s)
        assert not checker.trouble
        checking.cancel()

    run_virtual(scenario(), limit_s=10_000)
    assert cut.rejoined == len(announced) >= 5
    assert said.getvalue().count("Others do not see this peer") == 1
    assert ("Others see this peer again" in said.getvalue()) is not bool(service)
