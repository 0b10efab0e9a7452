"""Options of ``python -m node.join``, as typed and from a file, and what they ask for."""

import argparse
import logging
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.plans.catalogue.precision import QUANTISED
from dht.checkpoints.hub import HubId, local_path, served_name, typed_model
from dht.command_line import Parser, flag_of
from dht.errors import UserError, reason_of
from dht.process.home import at_home
from dht.swarm_options import add_swarm, settle_swarm
from node.owner.reporter import gibibytes
from node.peer.first_steps import WHICH
from node.peer.join_file import FILE_BYTES_MAX, as_flags
from node.peer.lent_before import LENT_BEFORE, LIMITS, OF_TRAFFIC, check_limits, take_limits

if TYPE_CHECKING:
    from dht.messages.types import Assignment, ModelSpec, UplinkClaim
    from node.links.lent_traffic import LentTraffic
    from node.owner.idle_policy import UseConfig

logger = logging.getLogger(__name__)

DEFAULT_IDENTITY = Path("~/.anabranch/identity.key")
UPLINK_FILE = "uplink.key"
"""File beside the identity with the secret of the internet connection."""
MODEL_NAME_MAX = 128


def parse() -> argparse.Namespace:
    """Parse the command's arguments; raises UserError."""
    parser = join_parser()
    first, _ = _config_parser().parse_known_args()
    typed = sys.argv[1:]
    if first.config is not None:
        typed = [*_configured(first.config, parser), *typed]
    arguments = parser.parse_args(typed)
    arguments.identity = at_home(arguments.identity, "--identity FILE")
    _settle_devices(arguments)
    take_limits(arguments)
    _settle(arguments)
    _check(arguments)
    return arguments


def _configured(path: Path, parser: Parser) -> list[str]:
    """The flags in a file; raises UserError, with the file's name, where one is wrong."""
    text = _read_config(path)
    try:
        flags = as_flags(text, parser)
        parser.parse_known_args(flags)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return flags


def _config_parser() -> Parser:
    parser = Parser(prog="python -m node.join", add_help=False)
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
        raise UserError(f"--config {path} cannot be read: {reason_of(error)}") from None


def join_parser() -> Parser:
    parser = Parser(
        prog="python -m node.join",
        usage="%(prog)s [anabranch:…] [--model M] [options]",
        description="Lend this machine. --model founds a swarm, an invitation joins one; without"
        " these it joins the last one or a local one, or founds one. Ctrl-C leaves.",
        epilog="example: %(prog)s --gpu 0 --memory 6",
        exit_codes="0 left, 1 the machine broke, 2 your mistake, 3 no swarm or hub",
        may_be_empty=("name",),
    )
    add, rare = parser.add_argument, parser.add_rare
    add_swarm(parser)
    rare(
        "--config",
        type=Path,
        metavar="FILE",
        help="these options in TOML; typed ones override them",
    )
    add(
        "--model", type=typed_model, metavar="M", help="directory, .gguf, or hub id org/name[:file]"
    )
    rare(
        "--models",
        nargs="+",
        default=[],
        metavar="M",
        help="or one of these: the neediest, once you agree",
    )
    rare("--yes", action="store_true", help="take one of --models without being asked")
    rare("--model-name", metavar="NAME", help="serve it as NAME (its hub id or directory's name)")
    drafts = "small model of the same tokens or EAGLE-3 head that drafts for it (draft/), or none"
    rare("--draft", type=typed_model, metavar="M", help=drafts)
    device = parser.add_mutually_exclusive_group()
    device.add_argument(
        "--gpu",
        type=_gpus,
        dest="gpus",
        metavar="N",
        help="compute on GPU N (0,1: a peer on each)",
    )
    device.add_argument("--cpu", action="store_true", help="compute on the CPU")
    for name, limit in LIMITS.items():
        (rare if limit.rare else add)(flag_of(name), help=limit.help, **limit.flag)
    rare(
        "--port",
        type=int,
        metavar="P",
        help=f"TCP port (as last time, or from {LENT_BEFORE.port_default} on)",
    )
    rare("--host", metavar="H", help="IP address to listen on (0.0.0.0 or ::, all of them)")
    reached = "where others reach it, such as a forwarded port (as found)"
    rare("--announce", nargs="+", default=[], metavar="HOST:PORT", help=reached)
    identity = f"its secret key, made when missing ({DEFAULT_IDENTITY})"
    rare("--identity", type=Path, default=DEFAULT_IDENTITY, metavar="FILE", help=identity)
    uplink = "secret that machines behind one connection share (next to the identity)"
    rare("--uplink", type=Path, metavar="FILE", help=uplink)
    add("--name", metavar="NAME", help="shown to others (this machine's name)")
    add("--test", action="store_true", help="serve nobody; measure, and show what it would do")
    rare("--coordinators", nargs="+", default=[], metavar="ID", help="follow plans of these only")
    rare("--layers", metavar="START:END", help="serve these whatever the plan says")
    rare(
        "--calm", type=float, default=60.0, metavar="S", help="come back after S quiet seconds (60)"
    )
    dtypes = ("float32", "bfloat16", "float16")
    rare(
        "--dtype",
        choices=dtypes,
        metavar="D",
        help=f"{', '.join(dtypes)} (GPU: second; CPU: first; packed weights: the faster of both)",
    )
    rare(
        "--quantize",
        choices=QUANTISED,
        metavar="Q",
        help="weights in int8 or int4 (docs/weights.md)",
    )
    evens = "move sessions to freer peers also while memory suffices (docs/lend-a-gpu.md)"
    rare("--balance", action="store_true", help=evens)
    rare(
        "--int8-rows",
        choices=("off", "prefill", "all"),
        default="off",
        metavar="R",
        help="send activations of prompts (prefill) or all in int8 (off)",
    )
    rare("--anew", action="store_true", help="use only these options, not those of last time")
    rare("--threads", type=int, metavar="N", help="CPU threads (all cores that it may use)")
    rare(
        "--no-prefix-cache",
        action="store_true",
        help="keep nothing of a session for its client's next one",
    )
    rare("--no-kernels", action="store_true", help="on a GPU, use only torch's own kernels")
    rare("--refresh-profile", action="store_true", help="measure this machine again")
    rare("--json-log", action="store_true", help="one JSON object per event, to stderr")
    return parser


def _settle(arguments: argparse.Namespace) -> None:
    """Which network, model and weights are meant; raises UserError.

    A peer needs the files of its model. From a directory it serves what the network names. A model
    that nobody typed is the one that this peer served when it was here last, or is left open: to
    have asked for a model, or to be invited to one, is no word on what this machine should serve.
    """
    is_named = arguments.model is not None
    if is_named and arguments.models:
        raise UserError("--model says which model, --models among which to choose; give one")
    if arguments.yes and not arguments.models:
        raise UserError("--yes goes with --models: else strangers say what this machine fetches")
    arguments.typed_network = arguments.network
    arguments.bundled, arguments.lendable = False, 0
    settle_swarm(arguments, may_found=True, model="", any_model=not is_named)
    arguments.alone = not arguments.model and not arguments.initial_peers
    if arguments.alone and arguments.models:
        raise UserError(WHICH)
    if not is_named and arguments.recalled and not arguments.models:
        _take_served(arguments)
    if not arguments.model:
        arguments.model, arguments.model_name, arguments.fingerprint = "", None, ""
        return
    arguments.model_name = arguments.model_name or arguments.said_model or None
    is_same = arguments.model_name == arguments.said_model
    arguments.fingerprint = arguments.said_fingerprint if is_same else ""


def _take_served(arguments: argparse.Namespace) -> None:
    """Fill in what this peer served in the remembered network, if it did."""
    from node.peer.remembering import served_before

    served = served_before(arguments.identity, arguments.network)
    if served is None:
        return
    if HubId.parse(served.model) is None and not local_path(served.model):
        raise UserError(
            f"{served.model}, which this peer served, is no longer here: say with --model which"
            " model to serve, or with --models among which to choose"
        )
    arguments.model = served.model
    arguments.said_model, arguments.said_fingerprint = served.model_name, served.fingerprint


def _check(arguments: argparse.Namespace) -> None:
    from dht.identity.peer_id import is_peer_id
    from dht.transport.config import any_host, listen_address

    arguments.host = arguments.host or any_host()
    listen_address(arguments.host, 0)
    if arguments.model and arguments.model_name is None:
        arguments.model_name = served_name(arguments.model)
    if arguments.model and not 0 < len(arguments.model_name) <= MODEL_NAME_MAX:
        raise UserError(
            f"the model's name has {len(arguments.model_name)} characters; give one of 1 to"
            f" {MODEL_NAME_MAX} with --model-name"
        )
    if arguments.threads is not None and arguments.threads < 1:
        raise UserError(f"--threads is {arguments.threads}; it must be at least 1")
    check_limits(arguments)
    if len(arguments.name or "") > LENT_BEFORE.name_max:
        raise UserError(
            f"--name has {len(arguments.name)} characters; the limit is {LENT_BEFORE.name_max}"
        )
    use_of(arguments)
    span_of(arguments.layers)
    arguments.announce = _announced(arguments.announce)
    for peer_id in arguments.coordinators:
        if not is_peer_id(peer_id):
            raise UserError(f"--coordinators names {peer_id[:80]!r}, which is no peer id")


def _settle_devices(arguments: argparse.Namespace) -> None:
    """Which devices are lent, ``gpu`` as the first of ``gpus``; raises UserError."""
    if arguments.gpus is None and not arguments.cpu:
        arguments.cpu = not has_gpu()
        arguments.gpus = None if arguments.cpu else (0,)
    count = len(arguments.gpus or ())
    arguments.gpu = arguments.gpus[0] if count else None
    if arguments.layers and count > 1:
        raise UserError("--layers is for one peer; join with each of the GPUs by itself")
    for name, limit in LIMITS.items():
        if limit.of_gpu and getattr(arguments, name) and arguments.cpu:
            raise UserError(
                f"{flag_of(name)} is for a GPU; of the CPU, --memory says how much is lent"
            )
    port_max = 65536 - max(1, count)
    if arguments.port is not None and not 0 <= arguments.port <= port_max:
        raise UserError(f"--port is {arguments.port}; it must be between 0 and {port_max}")


def _gpus(text: str) -> tuple[int, ...]:
    """The numbers of GPUs, with commas between them."""
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts) or len(set(map(int, parts))) < len(parts):
        raise argparse.ArgumentTypeError(f"{text[:80]!r}; give numbers such as 0 or 0,1")
    return tuple(map(int, parts))


def _announced(addresses: list[str]) -> list[str]:
    """``--announce`` as multiaddresses; raises UserError."""
    from dht.identity.multiaddr import tcp_address

    try:
        return [tcp_address(address) for address in addresses]
    except ValueError as error:
        raise UserError(f"--announce: {error}") from None


def span_of(layers: str | None) -> tuple[int, int] | None:
    """``--layers`` as a non-empty half-open range; raises UserError."""
    if layers is None:
        return None
    try:
        start, end = (int(part) for part in layers.split(":"))
    except ValueError:
        start, end = 0, 0
    if not 0 <= start < end:
        raise UserError(f"--layers is {layers!r}; it must be START:END, such as 0:4")
    return start, end


def use_of(arguments: argparse.Namespace) -> "UseConfig":
    """When to step aside, from the arguments; raises UserError."""
    from node.owner.idle_policy import UseConfig, names_of, window_of

    if not 0 <= arguments.calm <= 86_400:
        raise UserError(f"--calm is {arguments.calm}; it must be between 0 and 86400 seconds")
    try:
        windows = tuple(window_of(text) for text in arguments.schedule)
    except ValueError as error:
        raise UserError(f"--schedule: {error}") from None
    return UseConfig(
        idle_only=arguments.idle_only,
        mains_only=arguments.mains_only,
        processes=names_of(arguments.pause_on_process),
        windows=windows,
        calm_for_s=arguments.calm,
    )


def pinned_to(
    arguments: argparse.Namespace, peer_id: str, spec: "ModelSpec", memory_bytes: int
) -> "Assignment | None":
    """``--layers`` as an assignment of ``spec``'s layers. Raises UserError for layers that are none
    of the model's, or that do not fit into the memory."""
    from dht.messages.types import Assignment, kv_tokens_least, stage_bytes

    span = span_of(arguments.layers)
    if span is None:
        return None
    start, end = span
    if end > spec.layers:
        raise UserError(f"--layers is {arguments.layers}; {spec.name} has {spec.layers} layers")
    kv_tokens = kv_tokens_least(spec)
    least_bytes = stage_bytes(spec, start, end, kv_tokens)
    if least_bytes > memory_bytes:
        raise UserError(
            f"--layers {arguments.layers} of {spec.name} take {gibibytes(least_bytes)} with room"
            f" for {kv_tokens} tokens, and {gibibytes(memory_bytes)} are lent for them: name fewer"
            " layers, or lend more with --memory"
        )
    return Assignment(peer_id=peer_id, start=start, end=end)


def wanted_models(arguments: argparse.Namespace) -> list[str]:
    """The entries of ``--models``, which commas may part, too."""
    named = (each for entry in arguments.models for each in entry.split(",") if each)
    return [typed_model(each) for each in named]


def lent_traffic(arguments: argparse.Namespace) -> "LentTraffic":
    """The owner's limits on traffic; the month's count is kept beside the identity."""
    from coordinator.policies.links.token_bucket import Allowance
    from node.links.lent_traffic import LentTraffic, traffic_file

    def allowance(mbit: float | None) -> Allowance:
        return Allowance() if mbit is None else Allowance(mbit * 1e6 / 8)

    cap_gb = arguments.monthly_cap
    return LentTraffic(
        up=allowance(arguments.max_up),
        down=allowance(arguments.max_down),
        month_bytes_max=None if cap_gb is None else cap_gb * 1e9,
        month_file=traffic_file(arguments.identity.expanduser()),
    )


def uplink_file(arguments: argparse.Namespace) -> Path:
    """The file whose secret the peers behind one internet connection share: by default all of this
    user on this machine."""
    chosen: Path = arguments.uplink or arguments.identity.with_name(UPLINK_FILE)
    return at_home(chosen, "--uplink FILE")


def uplink_claim(arguments: argparse.Namespace, peer_id: str) -> "UplinkClaim | None":
    """The claim of the connection behind which this peer is; None where there is no room for its
    secret. Raises UserError where the owner named a file that cannot be used."""
    from dht.identity.uplink import claim_of, load_or_create_secret

    try:
        secret = load_or_create_secret(uplink_file(arguments))
    except UserError as error:
        if arguments.uplink is not None:
            raise
        logger.warning("%s; plans take this peer's connection for its own alone", error)
        return None
    return claim_of(secret, arguments.network, peer_id)


def relays_for_others(arguments: argparse.Namespace) -> bool:
    """Whether this peer offers to relay. Who limits its traffic lends that for answers."""
    from dht.networks.connecting import chosen_transport
    from dht.transport.config import TransportKind

    unlimited = all(getattr(arguments, name) is None for name in OF_TRAFFIC)
    return unlimited and chosen_transport(arguments.transport) is TransportKind.DAEMON


def said_by_owner(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of the peer's record that follow from its owner's options."""
    from dht.networks.connecting import chosen_transport
    from dht.transport.config import TransportKind

    return {
        "name": arguments.name,
        "light": chosen_transport(arguments.transport) is TransportKind.LIGHT,
        "relays": relays_for_others(arguments),
        "uplink": arguments.uplink_claim,
    }


def has_gpu() -> bool:
    """Whether this machine seems to have an NVIDIA GPU, found without loading torch."""
    if sys.platform == "win32":
        return shutil.which("nvidia-smi") is not None
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()
