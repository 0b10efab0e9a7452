"""Peers on several GPUs of one machine: what each is told, how they start and leave together."""

import argparse
import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from dht.command_line import own_process
from dht.errors import UserError
from dht.identity.peer_id import Identity
from dht.networks.invitation import read_invitation
from dht.networks.local_network import Offer, offer_of_peer
from node.join import _begin_beside
from node.owner import machine_watch
from node.peer import join_options
from node.peer.first_steps import BUNDLED
from node.peer.gpu_peers import Command, commands_of, flags_of, labelled, run_beside
from node.peer.join_options import uplink_file

ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWPG4vcRkmyKV8ab6ApzMgCSPzhatLKEvzEdQybzNqgUck"


def parsed(monkeypatch: pytest.MonkeyPatch, *words: str) -> argparse.Namespace:
    monkeypatch.setenv("ANABRANCH_MEMORY", "")
    monkeypatch.delenv("ANABRANCH_PEERS", raising=False)
    monkeypatch.setattr(sys, "argv", ["join", "--model", "models/brook", *words])
    return join_options.parse()


class TestFlags:
    def test_each_has_a_gpu_an_identity_a_port_and_its_share_of_the_traffic(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        words = ("--port", "31337", "--announce", "a.example:40", "--max-up", "9")
        words += ("--monthly-cap", "300", "--gpu", "0,3,1", "--identity", "keys/mine.key")
        arguments = parsed(monkeypatch, *words)
        assert arguments.gpu == 0
        monkeypatch.setattr(sys, "argv", ["join", *words, *flags_of(arguments, 0)])
        first = join_options.parse()
        monkeypatch.setattr(sys, "argv", ["join", *words, *flags_of(arguments, 1)])
        second = join_options.parse()
        assert (first.gpus, second.gpus) == ((0,), (3,))
        assert first.identity == Path("keys/mine.key")
        assert second.identity == Path("keys/mine-gpu3.key")
        assert uplink_file(first) == uplink_file(second) == Path("keys/uplink.key")
        assert (first.port, second.port) == (31337, 31338)
        assert (first.announce, second.announce) == (
            ["/dns/a.example/tcp/40"],
            ["/dns/a.example/tcp/41"],
        )
        assert (second.max_up, second.max_down, second.monthly_cap) == (3, None, 100)
        assert (second.model, second.model_name) == ("models/brook", "brook")

    def test_any_free_port_stays_that(self, monkeypatch: pytest.MonkeyPatch) -> None:
        arguments = parsed(monkeypatch, "--gpu", "0,1")
        assert not [flag for flag in flags_of(arguments, 1) if flag.startswith("--port")]

    @pytest.mark.parametrize(
        ("given", "told"), [((), ["--initial-peers", "anabranch:abc"]), ((ADDRESS,), [])]
    )
    def test_the_first_invites_the_others_where_nobody_else_is_named(
        self, given: tuple[str, ...], told: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        arguments = parsed(
            monkeypatch, "--gpu", "0,1", *(("--initial-peers", *given) if given else ())
        )
        first, second = commands_of(arguments, ["typed"])
        started = [*own_process(), "join", "typed"]
        assert list(first(""))[: len(started)] == started
        assert list(second("anabranch:abc")) == [*started, *flags_of(arguments, 1), *told]

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("--gpu", "0,0"), "give numbers such as"),
            (("--gpu", "0,"), "give numbers such as"),
            (("--gpu", "-1"), "give numbers such as|expected one argument"),
            (("--gpu", "0,1", "--layers", "0:2"), "--layers is for one peer"),
            (("--gpu", "0,1", "--port", "65535"), "between 0 and 65534"),
            (("--gpu", "0,1", "--cpu"), "not allowed with"),
        ],
    )
    def test_what_does_not_go_together(
        self, words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(UserError, match=said):
            parsed(monkeypatch, *words)


def test_every_line_says_whose_it_is() -> None:
    assert labelled("Left the swarm.", 1) == "GPU 1: Left the swarm."
    assert labelled("12", 1) == "GPU 1: 12"
    assert json.loads(labelled('{"event": "left"}', 1)) == {"event": "left", "gpu": 1}


PEER = """
import signal, sys, threading
from node.peer.gpu_peers import leave_with_starter
name, stubborn, invitation = sys.argv[1], int(sys.argv[2]), sys.argv[3]
leaves = threading.Event()
def interrupted(*_):
    global stubborn
    stubborn -= 1
    if stubborn < 0:
        leaves.set()
    else:
        print(f"{name} stays", flush=True)
signal.signal(signal.SIGINT, interrupted)
leave_with_starter()
print(f"anabranch:of-{name} {name} was told {invitation!r}", flush=True)
leaves.wait()
print(f"{name} left", file=sys.stderr)
"""


STARTER = """
import asyncio, json, sys
from node.peer.gpu_peers import run_beside
commands = json.loads(sys.argv[1])
asyncio.run(run_beside(range(2), [lambda _, c=c: c for c in commands]))
"""


def peer(name: str, stubborn: int = 0) -> Command:
    """One that invites others, and leaves when it is interrupted once more than ``stubborn``."""
    return lambda invitation: [sys.executable, "-c", PEER, name, str(stubborn), invitation]


def ending(code: int) -> Command:
    return lambda _: [sys.executable, "-c", f"raise SystemExit({code})"]


class Terminal(io.StringIO):
    """What was printed; Ctrl-C is typed whenever a line holds one of the words."""

    def __init__(self, *interrupt_at: str) -> None:
        super().__init__()
        self.interrupt_at = interrupt_at

    def write(self, text: str) -> int:
        if any(word in text for word in self.interrupt_at):
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


class TestRunning:
    def run(
        self, monkeypatch: pytest.MonkeyPatch, commands: Sequence[Command], *interrupt_at: str
    ) -> tuple[int, list[str], list[str]]:
        """The exit code, and the lines on stdout and stderr."""
        out, error = Terminal(*interrupt_at), Terminal(*interrupt_at)
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", error)
        code = asyncio.run(run_beside(range(len(commands)), commands))
        return code, out.getvalue().splitlines(), error.getvalue().splitlines()

    def test_they_start_in_turn_and_leave_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        peers = [peer("a"), peer("b"), peer("c")]
        code, said, left = self.run(monkeypatch, peers, "of-c")
        assert code == 0
        assert said == [
            "GPU 0: anabranch:of-a a was told ''",
            "GPU 1: anabranch:of-b b was told 'anabranch:of-a'",
            "GPU 2: anabranch:of-c c was told 'anabranch:of-a'",
        ]
        assert sorted(left) == ["GPU 0: a left", "GPU 1: b left", "GPU 2: c left"]

    def test_one_that_cannot_start_is_the_last(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.run(monkeypatch, [ending(2), peer("b")]) == (2, [], [])

    def test_one_that_ends_well_lets_the_next_one_start(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code, said, _ = self.run(monkeypatch, [ending(0), peer("b")], "of-b")
        assert (code, len(said)) == (0, 1)

    def test_one_that_breaks_leaves_the_others_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        broken: Command = lambda _: [  # noqa: E731
            sys.executable,
            "-c",
            "print('anabranch:x', flush=True); raise SystemExit(1)",
        ]
        code, said, left = self.run(monkeypatch, [broken, peer("b")], "of-b")
        assert code == 1
        assert said == [
            "GPU 0: anabranch:x",
            "GPU 1: anabranch:of-b b was told 'anabranch:x'",
        ]
        assert left == ["GPU 1: b left"]

    def test_a_second_interrupt_interrupts_and_a_third_ends(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code, said, left = self.run(monkeypatch, [peer("a", 1)], "of-a", "stays")
        assert (code, said[1:], left) == (0, ["GPU 0: a stays"], ["GPU 0: a left"])
        code, said, left = self.run(monkeypatch, [peer("a", 9)], "of-a", "stays")
        assert (code, said[1:], left) == (-signal.SIGKILL, ["GPU 0: a stays"] * 2, [])


def test_they_end_when_who_started_them_is_gone() -> None:
    """Nobody can tell them to leave then."""
    commands = [[sys.executable, "-c", PEER, name, "0", ""] for name in "ab"]
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, json.dumps(commands)], stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    assert ["of-a" in starter.stdout.readline(), "of-b" in starter.stdout.readline()] == [True] * 2
    peers = psutil.Process(starter.pid).children()
    assert len(peers) == 2
    starter.kill()
    starter.communicate()
    _, alive = psutil.wait_procs(peers, timeout=60)
    assert not alive


def test_peers_beside_are_no_others_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``--idle-only``, a peer would else step aside for the one on the next GPU."""
    beside = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        known = "import node.owner.machine_watch as w; print(*(p.pid for p in w._own()))"
        told = {
            which: subprocess.run(
                [sys.executable, "-c", known],
                env={**os.environ, **which_set},
                capture_output=True,
                text=True,
                check=True,
            ).stdout.split()
            for which, which_set in (("alone", {}), ("beside", {machine_watch.BESIDE: "1"}))
        }
        assert str(beside.pid) not in told["alone"]
        assert {str(beside.pid), str(os.getpid())} <= set(told["beside"])
    finally:
        beside.communicate(b"\n")


OAK = f"/ip4/192.168.0.7/tcp/31337/p2p/{Identity(b'1' * 32).peer_id}"


class TestAlone:
    """``join --gpu 0,1`` on a machine that knows no network and was told no model."""

    def commands(
        self, offers: tuple[Offer, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> list[list[str]]:
        monkeypatch.setenv("ANABRANCH_MEMORY", "")
        monkeypatch.delenv("ANABRANCH_PEERS", raising=False)
        monkeypatch.setattr("dht.networks.mdns.look", lambda: offers)
        monkeypatch.setattr("node.device.hardware.machine_of", lambda *_, **__: None)
        typed = ["--gpu", "0,1", "--identity", str(tmp_path / "id.key")]
        monkeypatch.setattr(sys, "argv", ["join", *typed])
        arguments = join_options.parse()
        asyncio.run(_begin_beside(arguments))
        first, second = commands_of(arguments, typed)
        return [list(first(""))[4:], list(second("anabranch:first"))[4:]]

    def test_the_first_founds_with_the_bundled_model_and_lends_little(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        first, second = self.commands((), monkeypatch, tmp_path)
        assert {f"--model={BUNDLED}", "--memory=1", "--local", "--gpu=0"} <= set(first)
        assert {f"--model={BUNDLED}", "--memory=1", "--gpu=1"} <= set(second)
        assert second[-2:] == ["--initial-peers", "anabranch:first"]
        for words in (first, second):  # each process takes what it is told
            monkeypatch.setattr(sys, "argv", ["join", *words[:-2], *words[-2:-2]])
            assert join_options.parse().model == str(BUNDLED)

    def test_both_join_what_is_offered_here(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        offer = offer_of_peer("oak", "garden", [OAK], "brook", "cd" * 32)
        for words in self.commands((offer,), monkeypatch, tmp_path):
            assert "anabranch:first" not in words
            invitation = read_invitation(words[-1])
            assert (invitation.network, invitation.model) == ("garden", "brook")
            assert ("cd" * 32).startswith(invitation.fingerprint or "no")
            assert "--memory=1" not in words
