"""``python -m node.join``: lend this machine to a swarm.

Without ``--initial-peers`` it founds a swarm and prints the command that others should type.
Ctrl-C leaves cleanly: live sessions finish first; a second Ctrl-C leaves at once.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dht.command_line import EXIT_DONE, Parser, run_command
from dht.errors import NetworkError, UserError
from dht.hub import served_name
from dht.types import Assignment, ModelSpec, NodeRecord, NodeState, model_key
from node.join_file import FILE_BYTES_MAX, as_flags
from node.report import Reporter, gibibytes

if TYPE_CHECKING:
    from dht.directory import Directory
    from dht.hivemind_transport import HivemindTransport
    from dht.identity import Identity
    from dht.transport import Transport
    from node.hardware import Machine
    from node.owner_use import UseConfig
    from node.stage_engine import EngineStage
    from node.traffic import Traffic
    from node.weights import WeightStore

DEFAULT_IDENTITY = Path("~/.anabranch/identity.key")
NAME_MAX = 64
MODEL_NAME_MAX = 128
SPINS = 1000
"""Of a CPU thread that waits for the others of its product, before it sleeps: microseconds."""


def parse() -> argparse.Namespace:
    """The command's arguments; raises UserError."""
    parser = _parser()
    first, _ = _config_parser().parse_known_args()
    typed = sys.argv[1:]
    if first.config is not None:
        typed = [*as_flags(_read_config(first.config), parser), *typed]
    arguments = parser.parse_args(typed)
    _check(arguments)
    return arguments


def _config_parser() -> Parser:
    parser = Parser(prog="python -m node.join", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    return parser


def _read_config(path: Path) -> str:
    try:
        with path.open("rb") as file:
            read = file.read(FILE_BYTES_MAX + 1)
        if len(read) > FILE_BYTES_MAX:
            raise UserError(f"--config {path} is larger than {FILE_BYTES_MAX} bytes")
        return read.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path} cannot be read: {error}") from None


def _parser() -> Parser:
    parser = Parser(
        prog="python -m node.join",
        usage="%(prog)s --model M [--initial-peers ADDR] [options]",
        description="Lend this machine to a swarm that serves one large language model. Without"
        " --initial-peers it founds a swarm. Ctrl-C leaves cleanly, a second one at once.",
        epilog="example: python -m node.join --model models/brook --cpu --initial-peers /ip4/…"
        " | exit codes: 0 left cleanly, 2 your mistake, 3 the swarm cannot be joined now",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30),
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="TOML with these flags' names; flags go before")
    add("--model", required=True, metavar="M", help="its directory, or hub id org/name[@revision]")
    add("--model-name", metavar="NAME", help="serve it as NAME (its hub id or directory's name)")
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--gpu", type=int, metavar="N", help="compute on GPU number N")
    device.add_argument("--cpu", action="store_true", help="compute on the CPU")
    add(
        "--memory", type=float, metavar="GIB", help="lend so much (85%% of what is free; CPU: 50%%)"
    )
    add("--max-vram", type=float, metavar="GIB", help="lend at most so much of the GPU's memory")
    add("--initial-peers", nargs="+", default=[], metavar="ADDR", help="addresses of peers")
    add("--port", type=int, default=0, metavar="P", help="TCP port (any free one)")
    host = "0.0.0.0"  # noqa: S104  a peer is there to be reached
    add("--host", default=host, metavar="H", help="IPv4 address to listen on (all)")
    identity = f"its secret key, made when missing ({DEFAULT_IDENTITY})"
    add("--identity", type=Path, default=DEFAULT_IDENTITY, metavar="FILE", help=identity)
    add("--name", default="", metavar="NAME", help="shown to others on the health page")
    add("--test", action="store_true", help="serve nobody: measure, and say what it would do")
    add("--coordinators", nargs="+", default=[], metavar="ID", help="follow plans of these only")
    add("--layers", metavar="START:END", help="serve these whatever the plan says")
    add("--idle-only", action="store_true", help="step aside while the machine or keyboard is used")
    aside = "step aside while such a program (a game) runs"
    add("--pause-on-process", nargs="+", default=[], metavar="NAME", help=aside)
    times = "serve only then, such as 22:00-07:30 (local time)"
    add("--schedule", nargs="+", default=[], metavar="T", help=times)
    add(
        "--calm", type=float, default=60.0, metavar="S", help="come back after S quiet seconds (60)"
    )
    add("--network", default="anabranch", metavar="NAME", help="name of the network")
    dtypes = ("float32", "bfloat16", "float16")
    add(
        "--dtype",
        choices=dtypes,
        metavar="D",
        help=f"{', '.join(dtypes)} (CPU: first, GPU: second)",
    )
    add(
        "--quantize",
        choices=("int8", "int4"),
        metavar="Q",
        help="weights in int8 or int4 (docs/weights.md)",
    )
    add("--max-up", type=float, metavar="MBIT", help="send at most so many megabits per second")
    add("--max-down", type=float, metavar="MBIT", help="receive at most so many")
    add("--monthly-cap", type=float, metavar="GB", help="leave when so many GB went in a month")
    add("--threads", type=int, metavar="N", help="CPU threads (all cores)")
    add("--refresh-profile", action="store_true", help="measure this machine again")
    add("--json-log", action="store_true", help="one JSON object per event, to stderr")
    return parser


def _check(arguments: argparse.Namespace) -> None:
    from dht.identity import is_peer_id

    if arguments.gpu is None and not arguments.cpu:
        arguments.cpu = not _has_gpu()
        arguments.gpu = None if arguments.cpu else 0
    if arguments.model_name is None:
        arguments.model_name = served_name(arguments.model)
    if not 0 < len(arguments.model_name) <= MODEL_NAME_MAX:
        raise UserError(
            f"the model's name has {len(arguments.model_name)} characters; give one of 1 to"
            f" {MODEL_NAME_MAX} with --model-name"
        )
    if not 0 <= arguments.port <= 65535:
        raise UserError(f"--port is {arguments.port}; it must be between 0 and 65535")
    if arguments.threads is not None and arguments.threads < 1:
        raise UserError(f"--threads is {arguments.threads}; it must be at least 1")
    for flag, least in (("max_up", 1), ("max_down", 1), ("monthly_cap", 0.001)):
        value = getattr(arguments, flag)
        if value is not None and not least <= value < 1e9:
            name = flag.replace("_", "-")
            raise UserError(f"--{name} is {value:g}; it must be at least {least:g}")
    if len(arguments.name) > NAME_MAX:
        raise UserError(f"--name has {len(arguments.name)} characters; the limit is {NAME_MAX}")
    use_of(arguments)
    for peer_id in arguments.coordinators:
        if not is_peer_id(peer_id):
            raise UserError(f"--coordinators names {peer_id[:80]!r}, which is no peer id")
    if "/" in arguments.network or not 0 < len(arguments.network) <= NAME_MAX:
        raise UserError(
            f"--network is {arguments.network[:80]!r}; it takes 1 to {NAME_MAX} characters, no /"
        )


def use_of(arguments: argparse.Namespace) -> "UseConfig":
    """When to step aside, as the arguments say; raises UserError."""
    from node.owner_use import UseConfig, names_of, window_of

    if not 0 <= arguments.calm <= 86_400:
        raise UserError(f"--calm is {arguments.calm}; it must be between 0 and 86400 seconds")
    try:
        windows = tuple(window_of(text) for text in arguments.schedule)
    except ValueError as error:
        raise UserError(f"--schedule: {error}") from None
    return UseConfig(
        idle_only=arguments.idle_only,
        processes=names_of(arguments.pause_on_process),
        windows=windows,
        calm_for_s=arguments.calm,
    )


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


async def main(arguments: argparse.Namespace) -> int:
    """Join, serve until interrupted, leave."""
    reporter = Reporter(json_log=arguments.json_log)
    # Read when torch loads. Threads that spin while they wait for each other take turns with other
    # programs on the same cores: one product of matrices then waits for whole time slices.
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))
    try:
        return await _join(arguments, reporter)
    except (UserError, NetworkError) as error:
        reporter.event("error", message=str(error))
        raise


async def _join(arguments: argparse.Namespace, reporter: Reporter) -> int:
    from dht.identity import Identity
    from dht.metered import MeteredTransport
    from node.hub_shards import open_model
    from node.rehearsal import rehearse

    store = await asyncio.to_thread(open_model, arguments.model)
    reporter.say(
        "Every tensor is held against its SHA-256 before it serves"
        if store.verified
        else "No hashes to check these files against (python -m node.weight_hashes writes them)"
    )
    identity = Identity.load_or_create(arguments.identity.expanduser())
    traffic = _traffic(arguments)
    traffic.refuse_if_exhausted()
    transport = await _connect(arguments, identity, reporter)
    try:
        from node.hardware import at_most, machine_of

        machine = at_most(machine_of(arguments.gpu, arguments.memory), arguments.max_vram)
        reporter.say(
            f"{machine.device.name}: {gibibytes(machine.free_bytes)} free,"
            f" {gibibytes(machine.lend_bytes)} lent"
        )
        engine = await _open_engine(arguments, store, machine, reporter)
        try:
            metered = MeteredTransport(transport, traffic.sent, traffic.received)
            if arguments.test:
                await rehearse(metered, arguments.network, engine, machine, reporter)
                return EXIT_DONE
            await _serve(arguments, metered, traffic, engine, machine, reporter)
        finally:
            traffic.save()
            store.stop()
            engine.close()
    finally:
        await transport.close()
    reporter.event("left")
    reporter.say("Left the swarm.")
    return EXIT_DONE


def _traffic(arguments: argparse.Namespace) -> "Traffic":
    """What the owner lends of the connection; the month's count is kept beside the identity."""
    from coordinator.allowance import Allowance
    from node.traffic import Traffic

    def allowance(mbit: float | None) -> Allowance:
        return Allowance() if mbit is None else Allowance(mbit * 1e6 / 8)

    cap_gb = arguments.monthly_cap
    return Traffic(
        up=allowance(arguments.max_up),
        down=allowance(arguments.max_down),
        month_bytes_max=None if cap_gb is None else cap_gb * 1e9,
        month_file=arguments.identity.expanduser().with_suffix(".traffic.json"),
    )


async def _connect(
    arguments: argparse.Namespace, identity: "Identity", reporter: Reporter
) -> "HivemindTransport":
    from dht.hivemind_transport import HivemindTransport, TransportConfig

    where = "Joining the swarm" if arguments.initial_peers else "Founding a swarm"
    with reporter.phase(where):
        try:
            transport = await HivemindTransport.create(
                TransportConfig(
                    identity=identity,
                    host_addresses=(f"/ip4/{arguments.host}/tcp/{arguments.port}",),
                    initial_peers=tuple(arguments.initial_peers),
                    client_mode=arguments.test and bool(arguments.initial_peers),
                )
            )
        except NetworkError as error:
            raise UserError(str(error)) from error
    reporter.event("listening", peer_id=transport.peer_id, addresses=list(transport.addresses))
    reporter.say(f"This peer is {transport.peer_id}")
    if not arguments.initial_peers and not arguments.test:
        reporter.say("Others join with:")
        reporter.say(
            f"  python -m node.join --model {arguments.model} --initial-peers"
            f" {transport.addresses[0]}"
        )
        reporter.say("Anyone asks with:")
        reporter.say(
            f"  python -m client.generate --model {arguments.model} --prompt 'One morning'"
            f" --initial-peers {transport.addresses[0]}"
        )
    return transport


async def _open_engine(
    arguments: argparse.Namespace, store: "WeightStore", machine: "Machine", reporter: Reporter
) -> "EngineStage":
    from node import lean_transformers
    from node.stage_engine import EngineStage

    dtype = arguments.dtype or ("float32" if machine.torch_device == "cpu" else "bfloat16")
    with reporter.phase("Measuring this machine"):
        await asyncio.to_thread(lean_transformers.prepare)
        engine = await EngineStage.open(
            store,
            name=arguments.model_name,
            torch_device=machine.torch_device,
            dtype=dtype,
            quantize=arguments.quantize,
            memory_bytes=machine.lend_bytes,
            threads=arguments.threads,
            refresh_profile=arguments.refresh_profile,
        )
    fastest = max(engine.tokens_per_s)
    reporter.event(
        "measured",
        tokens_per_s=list(engine.tokens_per_s),
        layers_max=len(engine.tokens_per_s),
        fit_error=engine.profile.fit_error,
        remembered=engine.remembered,
    )
    reporter.say(
        f"Up to {len(engine.tokens_per_s)} of {engine.spec.layers} layers fit"
        f" ({engine.precision});"
        f" {engine.tokens_per_s[-1]:.0f} tokens/s with all of them, {fastest:.0f} with one"
    )
    return engine


async def _serve(
    arguments: argparse.Namespace,
    transport: "Transport",
    traffic: "Traffic",
    engine: "EngineStage",
    machine: "Machine",
    reporter: Reporter,
) -> None:
    from coordinator.plan_store import PlanStore
    from coordinator.review import ReviewConfig
    from coordinator.reviewer import Reviewer
    from coordinator.runtime import Coordinator, CoordinatorConfig
    from dht.directory import Directory
    from node import VERSION
    from node.owner_watch import MachineWatch
    from node.peer import Peer, PeerConfig
    from node.stage import StageConfig, StageServer
    from node.watch import Watch

    directory = Directory(transport, arguments.network, model_key(engine.spec.name))
    await _refuse_other_weights(directory, engine.spec)
    engine.peer_id = transport.peer_id
    stage = StageServer(transport, engine, StageConfig(), traffic)
    engine.on_results = stage.on_results
    coordinators = frozenset(arguments.coordinators)
    plans = PlanStore(
        transport,
        directory,
        review=Reviewer(transport, directory, ReviewConfig()),
        coordinators=coordinators,
    )
    coordinator = Coordinator(
        transport,
        directory,
        plans,
        model=engine.spec,
        config=CoordinatorConfig(coordinators=coordinators),
        on_event=reporter.event,
    )
    record = NodeRecord(
        peer_id=transport.peer_id,
        name=arguments.name,
        version=VERSION,
        device=machine.device,
        model=engine.spec,
        memory_bytes=machine.lend_bytes,
        kv_tokens_min=engine.kv_tokens_min,
        tokens_per_s=engine.tokens_per_s,
        precision=engine.precision,
        state=NodeState.WAITING,
        joined_unix_s=transport.now(),
    )
    use = use_of(arguments)
    peer = Peer(
        transport=transport,
        directory=directory,
        engine=engine,
        stage=stage,
        coordinator=coordinator,
        plans=plans,
        reporter=reporter,
        record=record,
        config=PeerConfig(pinned=_pinned(arguments.layers, transport.peer_id, engine), use=use),
        machine=MachineWatch(use, gpu=arguments.gpu is not None),
    )
    path = arguments.identity.expanduser().with_suffix(".contribution.json")
    cuda = machine.device.kind == "cuda"
    finished = partial(stage.counters.__getitem__, "finished")
    peer.watch = Watch(peer.figures, finished, reporter, path, sensing=cuda)
    with _on_interrupt(peer.leave):
        await peer.run()


def _pinned(layers: str | None, peer_id: str, engine: "EngineStage") -> Assignment | None:
    """``--layers`` as an assignment; raises UserError."""
    if layers is None:
        return None
    try:
        start, end = (int(part) for part in layers.split(":"))
    except ValueError:
        raise UserError(f"--layers is {layers!r}; it must be START:END, such as 0:4") from None
    if not 0 <= start < end <= engine.spec.layers:
        raise UserError(f"--layers is {layers}; {engine.spec.name} has {engine.spec.layers} layers")
    return Assignment(peer_id=peer_id, start=start, end=end)


async def _refuse_other_weights(directory: "Directory", mine: ModelSpec) -> None:
    """A swarm serves one set of weights under one name."""
    others = [record.model for record in (await directory.nodes()).values()]
    if others and all(model.fingerprint != mine.fingerprint for model in others):
        raise UserError(
            f"this swarm serves other weights as {mine.name}: theirs are"
            f" {others[0].fingerprint[:12]}, yours {mine.fingerprint[:12]}"
        )


class _on_interrupt:
    """While active, SIGINT and SIGTERM call ``leave`` instead of raising."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._loop.add_signal_handler(number, self._leave)
            except NotImplementedError:  # Windows
                signal.signal(number, lambda *_: self._loop.call_soon_threadsafe(self._leave))

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._loop.remove_signal_handler(number)
            except NotImplementedError:
                signal.signal(number, signal.default_int_handler)


if __name__ == "__main__":
    sys.exit(run_command(parse, main))
