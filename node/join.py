"""``python -m node.join``: lends this machine to a swarm.

Without an address it founds a swarm. It prints an invitation for others, and remembers the network
for this user's next commands. Ctrl-C leaves cleanly: live sessions finish first; a second Ctrl-C
leaves at once.
"""

import argparse
import asyncio
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dht.command_line import COMMAND, EXIT_DONE, on_interrupt, run_command
from dht.errors import NetworkError, UserError
from dht.hub import local_path, resolved
from dht.messages.types import Assignment, ModelSpec, NodeRecord, NodeState, model_key
from node.owner.reporter import Reporter, gibibytes
from node.peer.join_options import parse, span_of, use_of

if TYPE_CHECKING:
    from coordinator.catalogue.need import Need
    from dht.budget import Budget
    from dht.identity.peer_id import Identity
    from dht.local_network import Offer
    from dht.records.directory import Directory
    from dht.supervision import Supervisor, Work
    from dht.transport.interface import Transport
    from dht.transport.metered import ByteMeter
    from node.device.hardware import Machine
    from node.links.lent_traffic import LentTraffic
    from node.stage.draft_engine import DraftEngine
    from node.stage.local_engine import LocalEngine
    from node.weights.store import WeightStore

SPINS = 1000
"""Spin count of a CPU thread that waits for others of its product: some microseconds."""


async def main(arguments: argparse.Namespace) -> int:
    """Join, serve until interrupted, leave."""
    reporter = Reporter(json_log=arguments.json_log)
    # torch reads this when it is loaded. Threads that spin while they wait for each other take
    # turns with other programs on the same cores; a matrix product then waits for whole time
    # slices.
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))
    try:
        arguments.moved = arguments.moves_on = False
        arguments.loaded = None  # the identity, whose file this process keeps for itself
        while True:
            code = await _join(arguments, reporter)
            if not arguments.moves_on:
                return code
            arguments.moved, arguments.moves_on = True, False
            arguments.model, arguments.model_name, arguments.fingerprint = "", None, ""
    except (UserError, NetworkError) as error:
        reporter.event("error", message=str(error))
        raise


async def _join(arguments: argparse.Namespace, reporter: Reporter) -> int:
    from dht.budget import Budget
    from dht.identity.peer_id import Identity
    from dht.supervision import Supervisor
    from dht.transport.metered import ByteMeter, MeteredTransport
    from node.device.hardware import at_most, machine_of
    from node.device.nvidia import held_to
    from node.links.text_server import ServedTexts, TextServer

    store = await _open_store(arguments, reporter) if arguments.model else None
    identity = arguments.loaded or Identity.load_or_create(arguments.identity.expanduser())
    arguments.loaded = identity
    _settle_addresses(arguments, identity.peer_id)
    traffic = _traffic(arguments)
    # Before others are told to join, because this command ends if the machine lacks something.
    found = await asyncio.to_thread(machine_of, arguments.gpu, arguments.memory)
    machine = at_most(found, arguments.max_vram)
    reporter.say(
        f"{machine.device.name}: {gibibytes(machine.free_bytes)} free,"
        f" {gibibytes(machine.lend_bytes)} lent"
    )
    meter = ByteMeter(traffic.sent, traffic.received)
    traffic.purposes = meter.purposes
    parts = Supervisor(
        lambda part, error: reporter.event("error", message=f"{part}: {error or repr(error)}")
    )
    budget = Budget()
    transport = await _connect_again(arguments, identity, meter, parts, budget, reporter)
    try:
        if store is None:
            await _choose(arguments, transport, machine, reporter)
            store = await _open_store(arguments, reporter)
        drafts = await _open_drafts(arguments, store, machine, reporter)
        if drafts is not None:
            machine = replace(machine, lend_bytes=machine.lend_bytes - drafts.memory_bytes)
        with held_to(machine.driver_name, arguments.power_limit):
            engine = await _open_engine(arguments, store, machine, reporter)
            engine.drafts = drafts
            try:
                metered = MeteredTransport(transport, meter)
                texts = ServedTexts.of(store.directory, store.root, store.weights_digest)
                if arguments.test:
                    from node.peer.dry_run import rehearse

                    await rehearse(
                        metered,
                        arguments.network,
                        engine,
                        machine,
                        reporter,
                        host=arguments.host,
                        port=arguments.port,
                    )
                    return EXIT_DONE
                await TextServer(metered, texts, traffic, budget).start()
                await _serve(arguments, metered, traffic, engine, machine, parts, budget, reporter)
            finally:
                traffic.save()
                store.stop()
                engine.close()
    finally:
        await transport.close()
    reporter.event("left")
    reporter.say("Left the swarm.")
    return EXIT_DONE


def _settle_addresses(arguments: argparse.Namespace, peer_id: str) -> None:
    """Set ``arguments.founded``, and leave this peer's own addresses out of the remembered ones."""
    from node.peer.remembering import founded_by

    arguments.founded = not arguments.initial_peers
    if arguments.recalled:
        arguments.founded = founded_by(peer_id, arguments.initial_peers)
    if arguments.recalled or arguments.local:
        own = f"/p2p/{peer_id}"
        arguments.initial_peers = [a for a in arguments.initial_peers if not a.endswith(own)]


async def _open_store(arguments: argparse.Namespace, reporter: Reporter) -> "WeightStore":
    from node.model.opening import open_lean

    with reporter.phase("Reading the model's headers; new files are hashed", counted=True) as bar:
        return await asyncio.to_thread(open_lean, arguments.model, bar.update)


async def _choose(
    arguments: argparse.Namespace, transport: "Transport", machine: "Machine", reporter: Reporter
) -> None:
    """Settle on the model that needs this machine the most; raises as :func:`choices`."""
    from coordinator.problem.model_pin import named_peers
    from node.peer.choosing import agreed, choices

    named = named_peers(arguments.initial_peers)
    found = await choices(
        transport, arguments.network, named, machine.lend_bytes, _allowed(arguments)
    )
    # Who was asked once and named the models that may be chosen is not asked again.
    choice = await agreed(found, yes=arguments.yes or arguments.moved)
    reporter.say(f"Needed most by {choice.sentence()}")
    need = choice.need
    reporter.event("chosen", model=need.model.name, start=need.start, end=need.end)
    arguments.model, arguments.model_name = choice.files, need.model.name
    arguments.fingerprint = need.model.fingerprint


def _allowed(arguments: argparse.Namespace) -> list[str]:
    """The entries of ``--models``, which commas may part, too."""
    return [each for entry in arguments.models for each in entry.split(",") if each]


def _traffic(arguments: argparse.Namespace) -> "LentTraffic":
    """The owner's limits on traffic; the month's count is kept beside the identity."""
    from coordinator.links.token_bucket import Allowance
    from node.links.lent_traffic import LentTraffic

    def allowance(mbit: float | None) -> Allowance:
        return Allowance() if mbit is None else Allowance(mbit * 1e6 / 8)

    cap_gb = arguments.monthly_cap
    return LentTraffic(
        up=allowance(arguments.max_up),
        down=allowance(arguments.max_down),
        month_bytes_max=None if cap_gb is None else cap_gb * 1e9,
        month_file=arguments.identity.expanduser().with_suffix(".traffic.json"),
    )


async def _connect_again(
    arguments: argparse.Namespace,
    identity: "Identity",
    meter: "ByteMeter",
    parts: "Supervisor",
    budget: "Budget",
    reporter: Reporter,
) -> "Transport":
    """:func:`_connect`; a founder to whom nobody that it remembers answers founds once more."""
    try:
        return await _connect(arguments, identity, meter, parts, budget, reporter)
    except NetworkError:
        if not (arguments.founded and arguments.initial_peers):
            raise
    reporter.say("Nobody of those who were here before answers")
    arguments.initial_peers = []
    return await _connect(arguments, identity, meter, parts, budget, reporter)


async def _connect(
    arguments: argparse.Namespace,
    identity: "Identity",
    meter: "ByteMeter",
    parts: "Supervisor",
    budget: "Budget",
    reporter: Reporter,
) -> "Transport":
    from dht.connecting import connect
    from dht.transport.config import TransportConfig

    where = "Joining the swarm" if arguments.initial_peers else "Founding a swarm"
    with reporter.phase(where):
        transport = await connect(
            TransportConfig(
                identity=identity,
                kind=arguments.transport,
                host_addresses=(f"/ip4/{arguments.host}/tcp/{arguments.port}",),
                announce_addresses=tuple(arguments.announce),
                initial_peers=tuple(arguments.initial_peers),
                client_mode=arguments.test and bool(arguments.initial_peers),
                relays=_relays(arguments),
                meter=meter,
                parts=parts,
                budget=budget,
            )
        )
    reporter.event("listening", peer_id=transport.peer_id, addresses=list(transport.addresses))
    reporter.say(f"This peer is {transport.peer_id}")
    return transport


def _invite(
    arguments: argparse.Namespace,
    addresses: Sequence[str],
    spec: ModelSpec,
    reporter: Reporter,
) -> None:
    """Print commands for others with an invitation to this peer, and remember the network.

    Raises UserError where the weights are not those that the network was said to serve.
    """
    from dht.invitation import invitation_to, text_of
    from node.peer.remembering import addresses_to_keep

    if not spec.fingerprint.startswith(arguments.fingerprint):
        raise UserError(
            f"the network was said to serve {spec.name} with fingerprint"
            f" {arguments.fingerprint[:16]}; yours is {spec.fingerprint[:16]}: these are other"
            " weights"
        )
    given = arguments.initial_peers
    known = (*addresses, *given) if arguments.founded else (*given, *addresses)
    invitation = invitation_to(arguments.network, known, spec.name, spec.fingerprint)
    text = text_of(invitation)
    reporter.event("invitation", text=text)
    command = _command()
    at_home = " --model FILES" if local_path(arguments.model) else ""
    reporter.say(f"This peer's address is {addresses[0]}")
    reporter.say("Invite others (on this machine with an --identity FILE of their own):")
    reporter.say(f"  {command} join {text}{at_home}")
    reporter.say("Anyone asks with:")
    reporter.say(f"  {command} ask {text} --prompt 'One morning'")
    kept = addresses_to_keep(addresses, given, (), founded=arguments.founded)
    _remember(arguments, kept, spec, reporter)


def _remember(
    arguments: argparse.Namespace, addresses: Sequence[str], spec: ModelSpec, reporter: Reporter
) -> None:
    """Remember the network, to be reached at ``addresses``, for this user's next commands."""
    from dht.remembered import Remembered, remember

    remember(
        Remembered(
            network=arguments.network,
            initial_peers=tuple(addresses),
            model=resolved(arguments.model),
            model_name=spec.name,
            fingerprint=spec.fingerprint,
        ),
        reporter.say,
    )


def _remembers(
    arguments: argparse.Namespace,
    transport: "Transport",
    directory: "Directory",
    spec: ModelSpec,
    reporter: Reporter,
) -> "Work":
    """The work of remembering through whom the network is reached while this peer is away."""
    from dht.identity.dialling import DialRule
    from dht.remembered import is_remembered
    from node.peer.remembering import addresses_to_keep, remember_others

    def keep(met: Sequence[str]) -> None:
        if not is_remembered(arguments.network, spec.name):
            return  # its owner forgot it, or has used another network since
        own, given = transport.addresses, arguments.initial_peers
        kept = addresses_to_keep(own, given, met, founded=arguments.founded)
        _remember(arguments, kept, spec, reporter)

    rule = DialRule.of(arguments.initial_peers, transport.addresses)
    return partial(remember_others, directory, transport.peer_id, rule, keep)


def _command() -> str:
    """``anabranch`` where a shell finds it, else what runs the same with this Python."""
    if shutil.which(COMMAND) is not None:
        return COMMAND
    try:
        path = os.path.relpath(sys.executable)
    except ValueError:  # on another drive
        path = sys.executable
    return f"{shlex.quote(sys.executable if path.startswith(os.pardir) else path)} -m {COMMAND}"


async def _open_drafts(
    arguments: argparse.Namespace, store: "WeightStore", machine: "Machine", reporter: Reporter
) -> "DraftEngine | None":
    """The draft model that was named, or lies beside the model and takes little. Raises UserError
    and NetworkError."""
    from node.stage.draft_engine import SHARE_FOUND, DraftEngine, found_beside

    named = arguments.draft
    model = found_beside(arguments.model) if named is None else named
    if model is None or named == "none":
        return None
    with reporter.phase("Opening the draft model"):
        share = 1.0 if named else SHARE_FOUND
        try:
            drafts = await DraftEngine.prepared(
                model,
                store,
                device=machine.torch_device,
                dtype=arguments.dtype or machine.dtype,
                memory_bytes=int(share * machine.lend_bytes),
            )
        except UserError as error:
            if named:
                raise
            reporter.say(f"Nothing is drafted by a model: {error}")
            return None
    taken = gibibytes(drafts.memory_bytes)
    reporter.event("drafts", model=model, memory_bytes=drafts.memory_bytes)
    reporter.say(f"{model} drafts for it, with {taken} of what is lent")
    return drafts


async def _open_engine(
    arguments: argparse.Namespace, store: "WeightStore", machine: "Machine", reporter: Reporter
) -> "LocalEngine":
    from node.model import lean_transformers
    from node.stage.local_engine import LocalEngine

    dtype = arguments.dtype or machine.dtype
    if machine.hint and not arguments.dtype:
        reporter.say(machine.hint)
    with reporter.phase("Measuring this machine"):
        await asyncio.to_thread(lean_transformers.prepare_transformers)
        engine = await LocalEngine.open(
            store,
            name=arguments.model_name,
            torch_device=machine.torch_device,
            dtype=dtype,
            quantize=arguments.quantize,
            memory_bytes=machine.lend_bytes,
            threads=arguments.threads,
            kernels=not arguments.no_kernels,
            keep_prefixes=not arguments.no_prefix_cache,
            refresh_profile=arguments.refresh_profile,
            foretells=arguments.draft != "none",
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
    if engine.heads is not None:
        reporter.say("The model's own head drafts for it where this machine holds the last layer")
    reporter.say(f"It serves {engine.spec.name} with fingerprint {engine.spec.fingerprint}")
    return engine


async def _serve(
    arguments: argparse.Namespace,
    transport: "Transport",
    traffic: "LentTraffic",
    engine: "LocalEngine",
    machine: "Machine",
    parts: "Supervisor",
    budget: "Budget",
    reporter: Reporter,
) -> None:
    from coordinator.plans.review import ReviewConfig
    from coordinator.plans.reviewer import Reviewer
    from coordinator.plans.store import PlanStore
    from coordinator.problem.model_pin import named_peers
    from coordinator.runtime import Coordinator, CoordinatorConfig
    from dht.connecting import chosen_transport
    from dht.mdns import advertise
    from dht.records.directory import Directory
    from dht.transport.config import TransportKind
    from node import VERSION
    from node.links.measured_links import MeasuredLinks
    from node.owner.contribution_watch import ContributionWatch
    from node.owner.machine_watch import MachineWatch
    from node.peer.own_figures import OwnFigures
    from node.peer.peer import Peer, PeerConfig, report_stats
    from node.peer.plan_follower import FollowConfig
    from node.peer.roaming import MOVED_S, SETTLED_S, Roamer
    from node.stage.server import StageConfig, StageServer

    if arguments.int8_rows != "off" and engine.carries_more:
        raise UserError(
            "--int8-rows cannot be used: this model's rows carry more than hidden states"
        )
    directory = Directory(transport, arguments.network, model_key(engine.spec.name))
    await _refuse_other_weights(directory, engine.spec)
    _invite(arguments, transport.addresses, engine.spec, reporter)
    measured = MeasuredLinks()
    stage = StageServer(
        transport,
        engine,
        StageConfig(int8=arguments.int8_rows, draft_model=engine.drafts),
        traffic,
        addresses_of=directory.addresses_of,
        bandwidth_from=measured.bandwidth_from,
        on_idle=lambda: report_stats(reporter, engine, stage, parts, budget),
        parts=parts,
        budget=budget,
    )
    coordinators = frozenset(arguments.coordinators)
    plans = PlanStore(
        transport,
        directory,
        review=Reviewer(transport, directory, ReviewConfig()),
        model=engine.spec,
        coordinators=coordinators,
    )
    coordinator = Coordinator(
        transport,
        directory,
        plans,
        model=engine.spec,
        config=CoordinatorConfig(coordinators=coordinators),
        on_event=partial(_told, reporter),
        parts=parts,
    )
    record = NodeRecord(
        peer_id=transport.peer_id,
        name=arguments.name,
        software_version=VERSION,
        device=machine.device,
        model=engine.spec,
        memory_bytes=machine.lend_bytes,
        kv_tokens_min=engine.kv_tokens_min,
        tokens_per_s=engine.tokens_per_s,
        decode_layer_ns=engine.profile.decode_times,
        prompt_layer_ns=engine.profile.prompt_times,
        precision=engine.precision,
        state=NodeState.WAITING,
        light=chosen_transport(arguments.transport) is TransportKind.LIGHT,
        relays=_relays(arguments),
        joined_unix_s=transport.now(),
    )
    use = use_of(arguments)
    pinned = _pinned(arguments.layers, transport.peer_id, engine)
    peer = Peer(
        transport=transport,
        directory=directory,
        engine=engine,
        stage=stage,
        coordinator=coordinator,
        plans=plans,
        reporter=reporter,
        record=record,
        config=PeerConfig(follow=FollowConfig(pinned=pinned), use=use),
        measured=measured,
        machine=MachineWatch(use, gpu=arguments.gpu is not None),
        refined=OwnFigures(engine, stage).refined,
        parts=parts,
        budget=budget,
    )
    path = arguments.identity.expanduser().with_suffix(".contribution.json")
    finished = partial(stage.counters.__getitem__, "finished")
    watch = ContributionWatch(peer.figures, finished, reporter, path, gpu=machine.driver_name)

    def move(need: "Need") -> None:
        reporter.event("moving", model=need.model.name, start=need.start, end=need.end)
        reporter.say(f"{need.model.name} lost its last holder of some layers: moving there")
        arguments.moves_on = True
        peer.leave()

    roamer = Roamer(
        transport,
        directory,
        lambda: peer.record,
        move,
        peer.is_spare,
        named=named_peers(arguments.initial_peers),
        allowed=_allowed(arguments),
        stays_s=MOVED_S if arguments.moved else SETTLED_S,
    )
    others: list[Work] = [roamer.run] if len(_allowed(arguments)) > 1 else []
    if arguments.local and (
        offer := offer_here(arguments, transport.addresses, engine.spec, reporter)
    ):
        others.append(partial(advertise, offer))

    def leave() -> None:
        arguments.moves_on = False
        peer.leave()

    with on_interrupt(leave):
        remembers = _remembers(arguments, transport, directory, engine.spec, reporter)
        await peer.run(watch.run, remembers, *others)


def offer_here(
    arguments: argparse.Namespace,
    addresses: Sequence[str],
    spec: ModelSpec,
    reporter: Reporter,
) -> "Offer | None":
    """What ``--local`` tells this local network; None where nobody could join through this peer."""
    from dht.connecting import chosen_transport
    from dht.local_network import offer_of_peer
    from dht.transport.config import TransportKind

    if chosen_transport(arguments.transport) is TransportKind.LIGHT:
        reporter.say("A light peer lets nobody in, so it is not offered on this network")
        return None
    name = arguments.name or platform.node()
    try:
        offer = offer_of_peer(name, arguments.network, addresses, spec.name, spec.fingerprint)
    except UserError as error:
        reporter.say(f"Not offered on this network: {error}")
        return None
    reporter.say(f"Offered on this network (--local): {offer}")
    return offer


def _relays(arguments: argparse.Namespace) -> bool:
    """Whether this peer offers to relay for others. The daemon does that uncounted, so a peer that
    limits its traffic does not offer it."""
    from dht.connecting import chosen_transport
    from dht.transport.config import TransportKind

    uncounted = arguments.max_up is None and arguments.monthly_cap is None
    return uncounted and chosen_transport(arguments.transport) is TransportKind.DAEMON


def _told(reporter: Reporter, event: str, **fields: object) -> None:
    """Report an event of the coordinator. A missing plan is also told to people, who would
    otherwise see nothing happen."""
    reporter.event(event, **fields)
    if event == "no_plan":
        reporter.say(f"No plan for all layers now: {fields['reason']}. Waiting for that.")


def _pinned(layers: str | None, peer_id: str, engine: "LocalEngine") -> Assignment | None:
    """``--layers`` as an assignment; raises UserError."""
    span = span_of(layers)
    if span is None:
        return None
    start, end = span
    if end > engine.spec.layers:
        raise UserError(f"--layers is {layers}; {engine.spec.name} has {engine.spec.layers} layers")
    return Assignment(peer_id=peer_id, start=start, end=end)


async def _refuse_other_weights(directory: "Directory", mine: ModelSpec) -> None:
    """Raise UserError if the swarm serves other weights under this name."""
    others = [record.model for record in (await directory.nodes()).values()]
    if others and all(model.fingerprint != mine.fingerprint for model in others):
        raise UserError(
            f"this swarm serves other weights as {mine.name}: theirs are"
            f" {others[0].fingerprint[:12]}, yours {mine.fingerprint[:12]}"
        )


def run() -> int:
    """Run the command; returns its exit code."""
    return run_command(parse, main)


if __name__ == "__main__":
    sys.exit(run())
