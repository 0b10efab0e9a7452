"""Runs the libp2p daemon ``p2pd`` as a child process that cannot outlive this one.

On Linux the kernel kills the daemon when this process ends, however it ends, and keeps it from
sending QUIC. Elsewhere the daemon ends by itself if nothing ever attaches to it, and every orderly
end terminates it.
"""

import asyncio
import ctypes
import errno
import os
import platform
import shutil
import signal
import struct
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dht.errors import AnabranchError, MachineError, NetworkError, UserError
from dht.identity.peer_id import Identity
from dht.process.supervision import end_all, first_of
from dht.transport.listening import check_free

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
"""Fixed by Linux: options of prctl."""
_SECCOMP_MODE_FILTER = 2
"""Fixed by Linux: the mode of prctl's PR_SET_SECCOMP that takes a filter."""
_SENDMSG = {"x86_64": (0xC000003E, 46), "aarch64": (0xC00000B7, 211)}
"""Kernel's numbers for the architecture and for its system call sendmsg, by machine."""
_UNIX_PATH_BYTES_MAX = 104
"""Fixed by common systems, the shortest limit of them: bytes of a unix socket's path."""
_SOCKET_BYTES = len("/p2pclient-0123456789a.sock")
_DIRECTORY_PREFIX = "anabranch-p2p-"
_OWNER_FILE = "owner"
_TRIES = 8
"""Tries to make a directory that nobody removes before it is locked."""
_OF_MACHINE = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
"""Errors of a start for want of processes, memory or descriptors: no fault of the file."""
_LAST_LINES = 20
_COLLECT_AT = "128MiB"
"""Memory from which on the daemon collects garbage all the time; a quiet one takes half of it."""
_STOP_LIMIT_S = 2.0
_ATTACH_LIMIT_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """The daemon's options. Addresses are TCP multiaddresses."""

    binary: Path
    identity: Identity
    host_addresses: tuple[str, ...]
    """Addresses to listen on; empty: only dial."""
    announce_addresses: tuple[str, ...] = ()
    nat_traversal: bool = False
    """Whether to use port mapping, AutoNAT and calls through relays."""


@dataclass(frozen=True, slots=True)
class SocketDirectory:
    """A private directory with a path short enough for a unix socket in it.

    Its owner file is locked for as long as this process lives, and by that it is known to be in
    use: a process id says nothing in another PID namespace, which may share the directory above.
    """

    path: Path
    _lock: int
    """Descriptor of the owner file; the kernel gives up its lock when this process ends."""

    @classmethod
    def make(cls) -> "SocketDirectory":
        """Create and lock one, and remove those whose processes have ended."""
        for _ in range(_TRIES):
            path = Path(tempfile.mkdtemp(prefix=_DIRECTORY_PREFIX))
            if len(os.fsencode(path)) + _SOCKET_BYTES >= _UNIX_PATH_BYTES_MAX:
                path.rmdir()
                path = Path(tempfile.mkdtemp(prefix=_DIRECTORY_PREFIX, dir="/tmp"))
            try:
                lock = _locked(path / _OWNER_FILE, os.O_CREAT | os.O_EXCL)
            except OSError:
                continue
            if lock is None:
                continue
            made = cls(path, lock)
            if made.is_whole():  # nobody swept it between its making and its lock
                _sweep(path.parent)
                return made
            made.remove()
        raise MachineError(
            f"no file in {tempfile.gettempdir()} can be locked and kept: set TMPDIR to a directory"
            " on a local disk that nobody else cleans"
        )

    def is_whole(self, *sockets: Path) -> bool:
        """Whether the owner file and ``sockets`` are still there."""
        return all(each.exists() for each in (self.path / _OWNER_FILE, *sockets))

    def remove(self) -> None:
        """Remove the directory and give up the lock. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            os.close(self._lock)


class P2pDaemon:
    """One running daemon, its private socket directory and its last lines of output."""

    def __init__(self, place: SocketDirectory) -> None:
        self._place = place
        self.directory = place.path
        """Directory of mode 700 for the sockets of the daemon and of the clients attached to it."""
        self.control_path = self.directory / "p2pd.sock"
        self.ended = asyncio.Event()
        """Set when the daemon has ended, for any reason."""
        self._ready = asyncio.Event()
        self._sockets: tuple[Path, ...] = ()
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: DaemonConfig) -> "P2pDaemon":
        """Start a daemon and wait until it takes requests.

        Raises UserError for a taken port or an address that cannot be listened on, NetworkError
        when the daemon does not start. The caller sets the time limit.
        """
        for address in config.host_addresses:
            check_free(address)
        self = cls(SocketDirectory.make())
        try:
            await self._launch(config)
        except BaseException:
            await self.stop()
            raise
        return self

    @property
    def pid(self) -> int:
        """Process id of the daemon; 0 before it runs."""
        return self._process.pid if self._process is not None else 0

    def last_words(self) -> str:
        """The daemon's exit code, if it has ended, and its last line of output."""
        last = f"last line: {self._lines[-1]}" if self._lines else "it wrote nothing"
        code = self._process.returncode if self._process is not None else None
        return last if code is None else f"exit code {code}, {last}"

    async def stop(self) -> None:
        """End the daemon (after 2 s by force) and remove its files. May be called twice."""
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(_STOP_LIMIT_S):
                    await process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if self._reader is not None:
            await end_all((self._reader,))
        self.ended.set()
        self._place.remove()

    def can_be_reached(self) -> bool:
        """Whether the sockets are there, of this daemon and of the clients attached to it.

        A daemon whose socket was removed goes on running, and nobody can ask it anything.
        """
        if not self._sockets:
            self._sockets = tuple(self.directory.glob("*.sock"))
        return self._place.is_whole(self.control_path, *self._sockets)

    async def _launch(self, config: DaemonConfig) -> None:
        identity_path = config.identity.path
        if identity_path is None:
            identity_path = self.directory / "identity"
            identity_path.touch(mode=0o600)
            identity_path.write_bytes(config.identity.libp2p_bytes())
        try:
            self._process = await asyncio.create_subprocess_exec(
                str(config.binary),
                *_arguments(config, self.control_path, identity_path),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=_environment(),
                preexec_fn=_restrained(),
                # Ctrl-C must reach only this process: it needs the daemon until it has left.
                start_new_session=True,
            )
        except OSError as error:
            told = f"cannot run the p2p daemon {config.binary.name}: {error.strerror}"
            if error.errno in _OF_MACHINE:
                raise MachineError(f"{told}; this user or this machine runs too much") from error
            raise UserError(
                f"{told}; reinstall hivemind (its wheels carry the daemon for Linux x86-64)"
            ) from error
        self._reader = asyncio.get_running_loop().create_task(self._read_lines())
        await first_of(self._ready.wait(), self.ended.wait())
        if not self._ready.is_set():
            raise self._start_error(config)
        if config.identity.path is None:
            identity_path.unlink()  # already read; no key must remain in a temporary directory

    def _start_error(self, config: DaemonConfig) -> AnabranchError:
        words = " ".join(self._lines)
        if "failed to listen" in words or "failed to parse" in words:
            where = ", ".join(config.host_addresses) or "no address"
            return UserError(f"cannot listen on {where}: {self.last_words()}")
        return NetworkError(f"the p2p daemon did not start: {self.last_words()}")

    async def _read_lines(self) -> None:
        """Read the daemon's output, which would block on a full pipe otherwise."""
        assert self._process is not None  # noqa: S101  (set before this task starts)
        assert self._process.stdout is not None  # noqa: S101
        rest = b""
        try:
            while data := await self._process.stdout.read(1 << 14):
                *lines, rest = (rest + data).split(b"\n")
                rest = rest[-4096:]
                for line in lines:
                    text = line.decode(errors="replace").strip()[:512]
                    if text:
                        self._lines.append(text)
                    if text.startswith("Peer ID:"):
                        self._ready.set()
            await self._process.wait()
        finally:  # whatever ends this: a daemon that nobody reads from blocks before long
            self.ended.set()


def _arguments(config: DaemonConfig, control: Path, identity: Path) -> list[str]:
    nat = int(config.nat_traversal)
    listens = bool(config.host_addresses)
    arguments = [
        f"-listen=/unix{control}",
        f"-id={identity}",
        "-tls=1",
        "-connManager=1",
        "-dhtServer=1" if listens else "-dhtClient=1",
        f"-natPortMap={int(nat and listens)}",
        f"-autonat={int(nat and listens)}",
        f"-relay={nat}",
        # The relay that the daemon starts whatever its flags takes anybody's calls: its protocol is
        # taken over by dht.transport.relay_server. With the service a second one could come later.
        "-relayService=0",
        # The daemon's own search for relays found one but reserved no slot in 35 s, even when told
        # the relay and that it is private: dht.transport.relay_reservation reserves slots instead.
        "-autoRelay=0",
        f"-idleTimeout={_ATTACH_LIMIT_S}s",
    ]
    if listens:
        arguments.append(f"-hostAddrs={','.join(config.host_addresses)}")
    else:
        arguments.append("-noListenAddrs=1")
    if config.announce_addresses:
        arguments.append(f"-announceAddrs={','.join(config.announce_addresses)}")
    return arguments


def _environment() -> dict[str, str]:
    """The daemon's environment, which has it collect garbage before there is much: it would keep
    what strangers sent for two minutes."""
    return {"GOLOG_LOG_LEVEL": "error", "GOMEMLIMIT": _COLLECT_AT, **os.environ}


def _locked(path: Path, flags: int = 0) -> int | None:
    """A descriptor of the file, which this process has locked; None where another one has.

    Raises OSError where it cannot be opened.
    """
    import fcntl

    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        return None
    return opened


def _sweep(parent: Path) -> None:
    """Remove the directories that killed processes left behind.

    An owner file with a process id in it is one of software that locked none; whether it is in use
    cannot be told, so it stays.
    """
    for directory in parent.glob(f"{_DIRECTORY_PREFIX}*"):
        with suppress(OSError):  # another user's, or removed by another process
            if directory.stat().st_uid != os.getuid():
                continue
            lock = _locked(directory / _OWNER_FILE)
            if lock is None:
                continue
            try:
                if not os.fstat(lock).st_size:
                    shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)


class _SocketFilter(ctypes.Structure):
    """The kernel's ``struct sock_fprog``."""

    _fields_: ClassVar = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def _no_sendmsg() -> _SocketFilter | None:
    """A seccomp filter in which sendmsg fails with EPERM; None for other machines.

    The daemon cannot be told to have no QUIC, and dials the QUIC addresses that it hears of. In it
    only QUIC sends by sendmsg: TCP, port mapping and names use other calls.
    """
    if (numbers := _SENDMSG.get(platform.machine())) is None:
        return None
    load, jump_if, give = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    machine, call = numbers
    code = (
        (load, 0, 0, 4),  # the architecture of the call
        (jump_if, 0, 2, machine),
        (load, 0, 0, 0),  # the call's number
        (jump_if, 1, 0, call),
        (give, 0, 0, 0x7FFF_0000),  # SECCOMP_RET_ALLOW
        (give, 0, 0, 0x0005_0000 | errno.EPERM),  # SECCOMP_RET_ERRNO
    )
    packed = b"".join(struct.pack("=HBBI", *each) for each in code)
    return _SocketFilter(len(code), packed)


def _restrained() -> Callable[[], None] | None:
    """The child's call before exec: the kernel is to kill the child with this process, and to keep
    it from sending QUIC where it can."""
    if sys.platform != "linux":
        return None
    # Loaded here: between fork and exec no library may be loaded and little may be called.
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()
    if (no_quic := _no_sendmsg()) is not None:
        no_quic_at = ctypes.byref(no_quic)

    def ask() -> None:
        if no_quic is not None:
            prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, no_quic_at, 0, 0)
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before the request
            os._exit(1)

    return ask
