"""Runs a peer for each of several GPUs of this machine, as one command.

Each peer is a process, so that one that breaks ends alone, and has an identity, a port and a share
of the traffic that the owner lends. They start one after another, as they read the same files;
where the first founds a network, it invites the others. A peer leaves when its input ends: when
this process is told to leave, or is gone.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from dht.command_line import EXIT_DONE, flag_of, on_interrupt, own_process
from dht.networks.invitation import SCHEME, invitation_to, text_of
from dht.process.lasting_stream import LastingStream
from node.owner.machine_watch import BESIDE
from node.peer.lent_before import OF_TRAFFIC

LINE_BYTES_MAX = 1 << 20
_INVITATION = re.compile(rf"{SCHEME}[\w-]+")

Command = Callable[[str], Sequence[str]]
"""Makes a command from the invitation that the first one printed, empty for the first."""


def flags_of(arguments: argparse.Namespace, place: int) -> list[str]:
    """The flags of the peer with the GPU at ``place``, which override those that were typed.

    The first peer keeps the identity; ports follow each other; limits on traffic are shared out.
    """
    gpu, count = arguments.gpus[place], len(arguments.gpus)
    flags = [f"--gpu={gpu}"]
    if place:
        path = arguments.identity
        flags.append(f"--identity={path.with_name(f'{path.stem}-gpu{gpu}{path.suffix}')}")
    if arguments.port:
        flags.append(f"--port={arguments.port + place}")
    if arguments.announce:
        flags += ["--announce", *(_further(each, place) for each in arguments.announce)]
    if arguments.name is not None:
        flags.append(f"--name={arguments.name}")
    for name in OF_TRAFFIC:
        if (value := getattr(arguments, name)) is not None:
            flags.append(f"{flag_of(name)}={value / count:g}")
    for name in arguments.taken:  # what was said last time; each peer hears it as if typed now
        value = getattr(arguments, name)
        if isinstance(value, list):
            flags += [flag_of(name), *value]
        elif name not in OF_TRAFFIC:
            flags.append(flag_of(name) + ("" if value is True else f"={value:g}"))
    if arguments.model:
        flags += [f"--model={arguments.model}", f"--model-name={arguments.model_name}"]
    return flags


def _further(address: str, ports: int) -> str:
    """A multiaddress whose TCP port is greater by ``ports``."""
    return re.sub(r"(?<=/tcp/)\d+", lambda port: str(int(port[0]) + ports), address)


def commands_of(arguments: argparse.Namespace, typed: Sequence[str]) -> list[Command]:
    """``anabranch join`` for each of ``arguments.gpus``, with what was ``typed``."""
    is_told_whom = bool(arguments.initial_peers) and not arguments.recalled
    met: list[str] = []
    if arguments.alone and arguments.initial_peers:  # found here; nobody typed whom to join
        offer = invitation_to(
            arguments.network,
            arguments.initial_peers,
            arguments.said_model,
            arguments.said_fingerprint,
        )
        met = ["--initial-peers", text_of(offer)]

    def command_at(place: int) -> Command:
        flags = flags_of(arguments, place)
        if arguments.bundled and not place:  # a founder by itself is found on this network
            flags.append("--local")

        def command(invitation: str) -> Sequence[str]:
            invited = ["--initial-peers", invitation] if invitation and not is_told_whom else []
            return [*own_process(), "join", *typed, *flags, *met, *invited]

        return command

    return [command_at(place) for place in range(len(arguments.gpus))]


class _Peer:
    """One process: what it says, and how it is told to leave."""

    def __init__(self, gpu: int, process: asyncio.subprocess.Process) -> None:
        self._gpu = gpu
        self._process = process
        self.invited: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def work(self) -> int:
        """Pass on its lines until it ends; returns its exit code."""
        assert self._process.stdout is not None  # noqa: S101  both are pipes
        assert self._process.stderr is not None  # noqa: S101
        await asyncio.gather(
            self._pass_on(self._process.stdout, LastingStream(sys.stdout)),
            self._pass_on(self._process.stderr, LastingStream(sys.stderr)),
        )
        return await self._process.wait()

    async def _pass_on(self, lines: asyncio.StreamReader, out: LastingStream) -> None:
        async for raw in lines:
            line = raw.decode("utf-8", "replace").rstrip()
            found = _INVITATION.search(line)
            if found and not self.invited.done():
                self.invited.set_result(found[0])
            out.write(f"{labelled(line, self._gpu)}\n")
            out.flush()

    def leave(self, asked: int) -> None:
        """Ask it to leave; the second time at once; then end it."""
        if self._process.returncode is not None:
            return
        if asked == 1:
            assert self._process.stdin is not None  # noqa: S101  it is a pipe
            self._process.stdin.close()
        elif asked == 2 and sys.platform != "win32":
            self._process.send_signal(signal.SIGINT)
        else:
            self._process.kill()


def labelled(line: str, gpu: int) -> str:
    """A peer's line that says whose it is; an event of ``--json-log`` in a field ``gpu``."""
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        return f"GPU {gpu}: {line}"
    return json.dumps({**event, "gpu": gpu}, ensure_ascii=False)


async def run_beside(gpus: Sequence[int], commands: Sequence[Command]) -> int:
    """Run a command for each GPU until all have ended; returns the largest of their exit codes.

    The next one starts once the one before has printed an invitation, or ended well.
    """
    peers: list[_Peer] = []
    works: list[asyncio.Task[int]] = []
    asked = 0

    def leave() -> None:
        nonlocal asked
        asked += 1
        for peer in peers:
            peer.leave(asked)

    with on_interrupt(leave):
        invitation = ""
        for gpu, command in zip(gpus, commands, strict=True):
            peer = _Peer(gpu, await _started(command(invitation)))
            peers.append(peer)
            if asked:
                peer.leave(asked)
            works.append(work := asyncio.create_task(peer.work()))
            await asyncio.wait((work, peer.invited), return_when=asyncio.FIRST_COMPLETED)
            if asked or (work.done() and work.result() != EXIT_DONE):
                break
            if peer.invited.done():
                invitation = invitation or peer.invited.result()
        return max(await asyncio.gather(*works))


async def _started(command: Sequence[str]) -> asyncio.subprocess.Process:
    # A group of its own: a terminal's Ctrl-C must reach this process alone, which passes it on.
    if sys.platform == "win32":
        group = subprocess.CREATE_NEW_PROCESS_GROUP
    else:
        group = 0
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, BESIDE: "1", "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"},
        limit=LINE_BYTES_MAX,
        start_new_session=True,
        creationflags=group,
    )


def leave_with_starter() -> None:
    """In a peer that was started here: be interrupted when its input ends."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        if sys.platform == "win32":
            signal.raise_signal(signal.SIGINT)
        else:
            os.kill(os.getpid(), signal.SIGINT)

    if BESIDE in os.environ:
        threading.Thread(target=watch, name="starter", daemon=True).start()
