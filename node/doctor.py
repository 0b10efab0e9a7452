"""``anabranch doctor``: what this machine lacks to lend itself, or to ask, and what to do about it.

Each line says ``ok``, ``warning`` (slower or less, but it works) or ``problem``. Nothing is
announced and nobody is served.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import StrEnum
from functools import partial
from importlib import metadata

from dht.checkpoints.hub import endpoint_fault
from dht.command_line import EXIT_DONE, EXIT_MACHINE, Parser, command_of
from dht.errors import NetworkError, UserError
from dht.process.home import at_home
from dht.process.terminal import print_lines, saying
from dht.swarm_options import add_swarm, settle_swarm
from dht.transport.config import any_host, listen_address
from dht.transport.listening import listen_error


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """From when on something of this machine is worth a word."""

    hub_limit_s: float = 5.0
    skew_warn_s: float = 5.0
    skew_max_s: float = 30.0
    """Records live for 30 s and more: a clock that is that far off loses elections and records."""
    free_bytes_least: int = 1 << 30


DOCTOR = DoctorConfig()

PACKAGES = ("torch", "transformers", "hivemind", "libp2p", "huggingface-hub")


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, and what to do where it is not well."""

    level: Level
    text: str

    def __str__(self) -> str:
        return f"{self.level:<9}{self.text}"


ok, warning, problem = (partial(Finding, level) for level in Level)


def parse() -> argparse.Namespace:
    """The command's arguments; raises UserError."""
    parser = Parser(
        prog="python -m node.doctor",
        usage="%(prog)s [anabranch:…] [options]",
        description="Say what this machine lacks to join a network, and what to do about it.",
        epilog="example: %(prog)s --port 31337",
        exit_codes="0 nothing is wrong, 1 something is, 2 your mistake",
    )
    add_swarm(parser)
    parser.add_argument("--port", type=int, metavar="P", help="as in join (the one it would take)")
    parser.add_argument("--host", metavar="H", help="as in join (all)")
    arguments = parser.parse_args()
    arguments.host = arguments.host or any_host()
    listen_address(arguments.host, 0)
    if arguments.port is None:
        arguments.port = _port_of_join(arguments.host)
    if not 0 <= arguments.port <= 65535:
        raise UserError(f"--port is {arguments.port}; it must be between 0 and 65535")
    arguments.model = None
    settle_swarm(arguments, may_found=True, model="", any_model=True)
    return arguments


def _port_of_join(host: str) -> int:
    """The port that ``join`` would take on this machine; 0: any."""
    from node.peer.join_options import DEFAULT_IDENTITY
    from node.peer.lent_before import port_of

    try:
        identity = at_home(DEFAULT_IDENTITY, "--identity FILE")
    except UserError:  # whoever has no home names another file to join
        return 0
    port = port_of(argparse.Namespace(host=host, identity=identity, anew=True))
    if port.claim is not None:
        port.claim.close()
    return port.number


async def main(arguments: argparse.Namespace) -> int:
    """Print one line for each thing that was looked at."""
    levels = set()

    def tell(finding: Finding) -> None:
        levels.add(finding.level)
        print_lines(str(finding))

    tell(ok(f"Python {sys.version.split()[0]}"))
    for name in PACKAGES:
        tell(package(name))
    for finding in devices():
        tell(finding)
    tell(port := port_free(arguments.host, arguments.port))
    with saying("asking the hub"):
        said = await hub_says()
    tell(hub(said))
    tell(clock(said, time.time()))
    with saying(f"asking network {arguments.network} whether it reaches this machine"):
        found = await network(arguments, port_is_free=port.level is Level.OK)
    tell(found)
    return EXIT_MACHINE if Level.PROBLEM in levels else EXIT_DONE


def package(name: str, version_of: Callable[[str], str] = metadata.version) -> Finding:
    """One package's version; either of the two transports is enough."""
    try:
        return ok(f"{name} {version_of(name)}")
    except metadata.PackageNotFoundError:
        pass
    beside = {"hivemind": "libp2p", "libp2p": "hivemind"}.get(name)
    if beside is None:
        return problem(f"{name} is not installed: pip install .")
    try:
        version_of(beside)
    except metadata.PackageNotFoundError:
        return problem(f"neither {name} nor {beside} is installed: no transport")
    return ok(f"{name} is not installed; {beside} does its work")


def devices() -> Iterator[Finding]:
    """The GPUs, if the machine has any, the CPU, and free memory."""
    from node.device.hardware import Machine, gpu_count, machine_of
    from node.peer.join_options import has_gpu

    def lent(machine: Machine) -> str:
        gib = machine.free_bytes / (1 << 30), machine.lend_bytes / (1 << 30)
        return f"{machine.device.name}: {gib[0]:.1f} GiB free, {gib[1]:.1f} GiB lent by default"

    if has_gpu():
        count = gpu_count()
        for index in range(max(1, count)):
            which = f"GPU {index}, " if count > 1 else ""
            try:
                machine = machine_of(index, None)
            except UserError as error:
                yield problem(str(error))
            else:
                yield ok(f"{which}{lent(machine)}, in {machine.dtype}")
    else:
        yield warning("no NVIDIA GPU was found: join lends the CPU")
    machine = machine_of(None, None)
    if machine.free_bytes < DOCTOR.free_bytes_least:
        yield warning(f"{lent(machine)}: close other programs")
    else:
        yield ok(lent(machine))


def port_free(host: str, port: int) -> Finding:
    """Whether this machine can listen where ``join`` would."""
    where = f"TCP port {port or '(any)'} at {host}"
    if (error := listen_error(host, port)) is not None:
        return problem(f"{where} cannot be used ({error.strerror}): name another with --port")
    return ok(f"{where} is free")


async def hub_says() -> float | str | None:
    """The hub's clock in Unix seconds, why it cannot be asked, or None where that is forbidden."""
    import aiohttp
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None
    limit = aiohttp.ClientTimeout(total=DOCTOR.hub_limit_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit, trust_env=True) as session,
            session.head(constants.ENDPOINT, allow_redirects=False) as answer,
        ):
            return parsedate_to_datetime(answer.headers.get("Date", "")).timestamp()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = endpoint_fault() or str(error) or type(error).__name__
        return f"{constants.ENDPOINT} ({reason})"
    except (TypeError, ValueError):
        return f"{constants.ENDPOINT} (it tells no time)"


def hub(said: float | str | None) -> Finding:
    """Whether models can be fetched."""
    if said is None:
        return ok("the hub is not asked (HF_HUB_OFFLINE)")
    if isinstance(said, str):
        return warning(f"the hub does not answer at {said}: models must be in directories here")
    return ok("the hub answers")


def clock(said: float | str | None, now_unix_s: float) -> Finding:
    """How far this machine's clock is from the hub's."""
    if not isinstance(said, float):
        return ok("the clock was compared with nobody's")
    off_s = now_unix_s - said
    text = f"the clock is {abs(off_s):.0f} s {'ahead of' if off_s > 0 else 'behind'} the hub's"
    if abs(off_s) < DOCTOR.skew_warn_s:
        return ok(text)
    level = Level.PROBLEM if abs(off_s) >= DOCTOR.skew_max_s else Level.WARNING
    return Finding(level=level, text=f"{text}: set it by NTP")


async def network(arguments: argparse.Namespace, *, port_is_free: bool) -> Finding:
    """Whether the network answers, and whether its peers reach this machine, if ``port_is_free``
    for that trial."""
    from dht.messages.types import Reach, model_key
    from dht.networks.connecting import observe
    from dht.records.directory import Directory
    from node.peer.dry_run import dialled_back

    if not arguments.initial_peers:
        return ok("no network is known here: give an invitation to see whether it is reached")
    try:
        transport = await observe(arguments.initial_peers, arguments.transport)
    except NetworkError as error:
        return problem(str(error))
    try:
        name = arguments.said_model
        if not name:
            return ok(f"network {arguments.network} answers; it was not said which model it serves")
        nodes = await Directory(transport, arguments.network, model_key(name)).nodes()
        if not nodes:
            return warning(f"network {arguments.network} answers; nobody in it serves {name} now")
        if not port_is_free:
            return ok(
                f"network {arguments.network} answers; whether it reaches that port is not known"
            )
        reach, sentence = await dialled_back(transport, nodes, arguments.host, arguments.port)
        level = Level.OK if reach is Reach.DIRECT else Level.WARNING
        return Finding(level=level, text=f"network {arguments.network}: {sentence}")
    except NetworkError as error:
        return warning(f"network {arguments.network}: {error}")
    finally:
        await transport.close()


run = command_of(parse, main)

if __name__ == "__main__":
    sys.exit(run())
