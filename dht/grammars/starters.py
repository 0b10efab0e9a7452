"""Starts processes that try a grammar each."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Protocol

COMMAND = (sys.executable, "-m", "dht.grammars.trial")
HOME = Path(__file__).resolve().parents[2]
"""Where they are started, so that they find this package and not another of its name."""


class Starter(Protocol):
    """Starts trials."""

    async def said_of(self, grammar: bytes, cpu_s: float) -> bytes:
        """What a trial with ``cpu_s`` of processor time says of a grammar; nothing where it was
        ended. It ends with this call. Raises OSError where none can be started."""
        ...


def starter_of(owner: object) -> Starter:
    """The quickest starter of this system; its processes end with ``owner``, at the latest."""
    return Copies(owner) if sys.platform == "linux" else Starts()


class Starts:
    """Starts a process anew for each trial, which takes a tenth of a second."""

    async def said_of(self, grammar: bytes, cpu_s: float) -> bytes:
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            str(len(grammar)),
            str(cpu_s),
            cwd=HOME,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            said, _ = await process.communicate(grammar)
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        return said


class Copies:
    """Copies one process that has imported what trials need, which takes a millisecond."""

    def __init__(self, owner: object) -> None:
        self._owner = weakref.ref(owner)
        self._requests: socket.socket | None = None
        """Over which copies are asked for."""

    async def said_of(self, grammar: bytes, cpu_s: float) -> bytes:
        request = b"%d %f" % (len(grammar), cpu_s)
        for _ in range(2):
            requests = self._requests = self._requests or self._started()
            reader, writer = await self._asked(requests, request)
            process_id = 0
            try:
                if process_id := int(await reader.readline() or 0):
                    writer.write(grammar)
                    said = await reader.read()
                    process_id = 0
                    return said
            except ConnectionError:  # ended before it had read all
                return b""
            finally:
                if process_id:
                    with suppress(ProcessLookupError):
                        os.kill(process_id, signal.SIGKILL)
                writer.close()
            if self._requests is requests:  # it has ended: another one is started, once
                requests.close()
                self._requests = None
        raise OSError("the process that is copied ends at once")

    @staticmethod
    async def _asked(
        requests: socket.socket, request: bytes
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection with a copy; it ends at once where the process that is copied has ended.

        Raises OSError where it does not keep up.
        """
        ours, its = socket.socketpair()
        with its:
            try:
                socket.send_fds(requests, [request], [its.fileno()])
            except BlockingIOError:
                ours.close()
                raise
            except OSError:
                pass
        return await asyncio.open_connection(sock=ours)

    def _started(self) -> socket.socket:
        ours, its = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with its:
            process = subprocess.Popen(
                COMMAND,
                cwd=HOME,
                stdin=its.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        ours.setblocking(False)
        if (owner := self._owner()) is not None:
            weakref.finalize(owner, _end, ours, process)
        return ours


def _end(requests: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    requests.close()
    process.kill()
    process.wait()
