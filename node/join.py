"""``python -m node.join``: lends this machine to a swarm.

Without an address it founds a swarm. It prints an invitation for others, and remembers the network
for this user's next commands. Ctrl-C leaves cleanly: live sessions finish first; a second Ctrl-C
leaves at once.
"""

import argparse
import asyncio
import gc
import os
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from dht.command_line import EXIT_DONE, command_of, on_interrupt
from dht.errors import NetworkError, UserError
from dht.messages.types import model_key
from dht.process.supervision import beside
from node.owner.own_health import HealthKeeper, health_file
from node.owner.reporter import Reporter, gibibytes
from node.peer.gpu_peers import commands_of, leave_with_starter, run_beside
from node.peer.join_options import (
    lent_traffic,
    parse,
    pinned_to,
    relays_for_others,
    said_by_owner,
    uplink_claim,
    use_of,
    wanted_models,
)
from node.peer.lent_before import keep_lent, port_of
from node.peer.naming import settle_name

if TYPE_CHECKING:
    from coordinator.plans.catalogue.need import Need
    from dht.budget import Budget
    from dht.identity.peer_id import Identity
    from dht.process.supervision import PartFunction, Supervisor
    from dht.records.directory import Directory
    from dht.transport.interface import Transport
    from dht.transport.metered import ByteMeter
    from node.device.hardware import Machine
    from node.links.lent_traffic import LentTraffic
    from node.peer.peer import Peer
    from node.stage.local_engine import LocalEngine
    from node.weights.store import WeightStore

SPINS = 1000
"""Spin count of a CPU thread that waits for others of its product: some microseconds."""
SLOW_MODULES = ("node.peer.loading", "node.stage.server", "coordinator.runtime")
"""Modules that take seconds to import (torch, transformers). They are imported in a thread, since
clients may already ask this peer who serves what."""


async def main(arguments: argparse.Namespace) -> int:
    """Join, serve until interrupted, leave."""
    if arguments.gpu is not None and len(arguments.gpus) > 1:
        keep_lent(arguments)
        if arguments.as_last:
            print(arguments.as_last, flush=True)
        if arguments.alone:
            await _begin_beside(arguments)
        return await run_beside(arguments.gpus, commands_of(arguments, sys.argv[1:]))
    leave_with_starter()
    reporter = Reporter(json_log=arguments.json_log)
    # torch reads this when it is loaded. Threads that spin while they wait for each other take
    # turns with other programs on the same cores; a matrix product then waits for whole time
    # slices.
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))
    try:
        arguments.moved = arguments.moves_on = False
        for line in (arguments.as_last, settle_name(arguments)):
            if line:
                reporter.say(line)
        arguments.loaded = None  # the identity, whose file this process keeps for itself
        health = HealthKeeper(health_file(arguments.identity))
        async with beside(health.run):
            while True:
                code = await _join(arguments, reporter, health)
                if not arguments.moves_on:
                    return code
                arguments.moved, arguments.moves_on = True, False
                arguments.model, arguments.model_name, arguments.fingerprint = "", None, ""
    except (UserError, NetworkError) as error:
        reporter.event("error", message=str(error))
        raise


async def _begin_beside(arguments: argparse.Namespace) -> None:
    """Settle for several GPUs on a network and a model where neither was said."""
    from node.peer.first_steps import BUNDLED_LEND_BYTES, begin_alone, next_steps

    reporter = Reporter(json_log=arguments.json_log)
    await begin_alone(arguments, reporter)
    if arguments.bundled:
        if arguments.memory is None:
            arguments.memory = BUNDLED_LEND_BYTES / 2**30
            arguments.taken += ("memory",)
        reporter.say(next_steps(0, "float32"))


async def _join(arguments: argparse.Namespace, reporter: Reporter, health: HealthKeeper) -> int:
    from dht.budget import Budget
    from dht.identity.peer_id import Identity
    from dht.process.supervision import Supervisor
    from dht.transport.metered import MeteredTransport
    from node.device.nvidia import held_to
    from node.links.text_server import ServedTexts, TextServer
    from node.peer.first_steps import begin_alone
    from node.peer.remembering import connect_or_found

    if arguments.alone:
        await begin_alone(arguments, reporter)
        arguments.alone = False
    store = await _open_store(arguments, reporter) if arguments.model else None
    arguments.loaded = identity = arguments.loaded or Identity.load_or_create(
        arguments.identity.expanduser()
    )
    _settle_place(arguments, identity, reporter)
    traffic = lent_traffic(arguments)
    # Before others are told to join, because this command ends if the machine lacks something.
    machine = await _machine(arguments, reporter)
    budget = Budget()
    meter = _meter_of(traffic, budget)
    parts = Supervisor(
        lambda part, error: reporter.event("error", message=f"{part}: {error or repr(error)}")
    )
    transport = await connect_or_found(
        arguments,
        partial(_connect, arguments, identity, meter, parts, budget, reporter),
        reporter,
    )
    try:
        if store is None:
            await _choose(arguments, transport, machine, reporter)
            store = await _open_store(arguments, reporter)
        await _import_slow_modules(reporter)
        from node.peer.loading import open_drafts, open_engine

        drafting = await open_drafts(arguments, store, machine, reporter)
        machine = drafting.left(machine)
        with held_to(machine.driver_name, arguments.power_limit):
            engine = await open_engine(arguments, store, drafting, machine, reporter)
            try:
                metered = MeteredTransport(transport, meter)
                texts = ServedTexts.of(store.directory, store.weights_digest)
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
                await _serve(
                    arguments, metered, traffic, engine, machine, parts, budget, reporter, health
                )
            finally:
                health.trouble = lambda: ""
                traffic.save()
                store.stop()
                engine.close()
    finally:
        await transport.close()
    reporter.event("left")
    reporter.say("Left the swarm.")
    return EXIT_DONE


def _settle_place(arguments: argparse.Namespace, identity: "Identity", reporter: Reporter) -> None:
    """Settle where this peer listens, and whom it greets."""
    from node.peer.remembering import settle_addresses

    settle_addresses(arguments, identity.peer_id)
    arguments.uplink_claim = uplink_claim(arguments, identity.peer_id)
    if arguments.port is None:
        arguments.listening = port = port_of(arguments)
        arguments.port = port.number
        if port.said:
            reporter.say(port.said)


async def _machine(arguments: argparse.Namespace, reporter: Reporter) -> "Machine":
    """The machine and what of it is lent, told; raises UserError. A quota of processor time bounds
    the threads, unless the owner does."""
    from node.device.hardware import at_most, machine_of
    from node.device.limits import cores, cpu_quota
    from node.peer.first_steps import BUNDLED_LEND_BYTES

    or_less = "memory" in arguments.taken  # as last time: less may be free now
    found = await asyncio.to_thread(machine_of, arguments.gpu, arguments.memory, or_less=or_less)
    machine = at_most(found, arguments.max_vram)
    if arguments.bundled and arguments.memory is None:
        arguments.lendable = machine.lend_bytes
        machine = replace(machine, lend_bytes=min(machine.lend_bytes, BUNDLED_LEND_BYTES))
    reporter.say(
        f"{machine.device.name}: {gibibytes(machine.free_bytes)} free"
        + (f" by {machine.limited_by}" if machine.limited_by else "")
        + f", {gibibytes(machine.lend_bytes)} lent"
    )
    quota = cpu_quota()
    if arguments.threads is None and quota is not None and quota < cores():
        arguments.threads = quota
    return machine


def _meter_of(traffic: "LentTraffic", budget: "Budget") -> "ByteMeter":
    """The meter of all streams, which counts what others take beside sessions, too."""
    from dht.transport.metered import ByteMeter

    budget.parties.trust_nobody()  # others come before this peer has looked at the network
    meter = ByteMeter(traffic.sent, traffic.received)
    meter.pause = traffic.wait_beside
    meter.beside = lambda peer_id, count: traffic.beside(
        count, lambda: budget.parties.knows(peer_id)
    )
    traffic.purposes = meter.purposes
    return meter


async def _import_slow_modules(reporter: Reporter) -> None:
    """Import them without looking for garbage, now or later, among all that stays with them."""
    if sys.modules.keys() >= set(SLOW_MODULES):
        return  # this process moves to another model
    gc.disable()
    try:
        with reporter.phase("Loading what computes (torch, transformers)"):
            for name in SLOW_MODULES:
                await asyncio.to_thread(import_module, name)
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()


async def _open_store(arguments: argparse.Namespace, reporter: Reporter) -> "WeightStore":
    from node.model.opening import open_lean

    with reporter.phase("Reading the model's headers; new files are hashed", counted=True) as bar:
        return await asyncio.to_thread(open_lean, arguments.model, bar)


async def _choose(
    arguments: argparse.Namespace, transport: "Transport", machine: "Machine", reporter: Reporter
) -> None:
    """Settle on the model that needs this machine the most; raises as :func:`choices`."""
    from coordinator.plans.catalogue.precision import precision_text
    from coordinator.problem.model_pin import named_peers
    from node.peer.choosing import agreed, choices

    found = await choices(
        transport,
        arguments.network,
        named_peers(arguments.initial_peers),
        machine.lend_bytes,
        wanted_models(arguments),
        precision=precision_text(arguments.dtype or machine.dtype, arguments.quantize),
        said=(arguments.said_model, arguments.said_fingerprint),
    )
    # Who was asked once and named the models that may be chosen is not asked again.
    is_asked = not (arguments.yes or arguments.moved)
    choice = await agreed(found, yes=not is_asked)
    if not is_asked:  # else it has just been read
        reporter.say(f"Needed most by {choice.sentence()}")
    need = choice.need
    reporter.event("chosen", model=need.model.name, start=need.start, end=need.end)
    arguments.model, arguments.model_name = choice.files, need.model.name
    arguments.fingerprint = need.model.fingerprint


async def _connect(
    arguments: argparse.Namespace,
    identity: "Identity",
    meter: "ByteMeter",
    parts: "Supervisor",
    budget: "Budget",
    reporter: Reporter,
) -> "Transport":
    from dht.networks.connecting import connect
    from dht.transport.config import TransportConfig, listen_address

    where = "Joining the swarm" if arguments.initial_peers else "Founding a swarm"
    with reporter.phase(where):
        transport = await connect(
            TransportConfig(
                identity=identity,
                kind=arguments.transport,
                host_addresses=(listen_address(arguments.host, arguments.port),),
                announce_addresses=tuple(arguments.announce),
                initial_peers=tuple(arguments.initial_peers),
                remembered_peers=tuple(arguments.remembered_peers),
                client_mode=arguments.test and bool(arguments.initial_peers),
                relays=relays_for_others(arguments),
                meter=meter,
                parts=parts,
                budget=budget,
            )
        )
    reporter.event("listening", peer_id=transport.peer_id, addresses=list(transport.addresses))
    reporter.say(f"This peer is {transport.peer_id}")
    return transport


async def _serve(
    arguments: argparse.Namespace,
    transport: "Transport",
    traffic: "LentTraffic",
    engine: "LocalEngine",
    machine: "Machine",
    parts: "Supervisor",
    budget: "Budget",
    reporter: Reporter,
    health: HealthKeeper,
) -> None:
    from coordinator.plans.reviewer import Reviewer
    from coordinator.plans.store import PlanStore
    from coordinator.policies.routing.balance import BalanceConfig
    from coordinator.runtime import Coordinator, CoordinatorConfig
    from dht.records.directory import Directory
    from node.links.probe import MeasuredLinks
    from node.owner.contribution_watch import ContributionWatch
    from node.owner.machine_watch import MachineWatch, unseen
    from node.peer.first_steps import next_steps
    from node.peer.inviting import invite, refuse_other_weights, warn_of_silent
    from node.peer.own_figures import OwnFigures, first_record
    from node.peer.peer import Peer, PeerConfig, report_stats
    from node.peer.plan_follower import FollowConfig, PeerCore
    from node.peer.remembering import remember_network, remember_served
    from node.stage.server import StageConfig, StageServer

    if arguments.int8_rows != "off" and engine.carries_more:
        raise UserError(
            "--int8-rows cannot be used: this model's rows carry more than hidden states"
        )
    spec, addresses = engine.spec, transport.addresses
    pinned = pinned_to(arguments, transport.peer_id, spec, machine.lend_bytes)
    directory = Directory(transport, arguments.network, model_key(spec.name))
    await refuse_other_weights(directory, spec, arguments.fingerprint)
    await warn_of_silent(arguments.announce, reporter)
    invite(arguments, addresses, spec, reporter)
    if arguments.bundled:
        reporter.say(next_steps(arguments.lendable or machine.lend_bytes, machine.dtype))
    remember_network(arguments, addresses, (), spec, reporter)
    remember_served(arguments, spec, reporter)
    keep_lent(arguments)
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
        review=Reviewer(transport, directory),
        model=spec,
        coordinators=coordinators,
        budget=budget,
    )
    coordinator = Coordinator(
        transport,
        directory,
        plans,
        model=spec,
        config=CoordinatorConfig(coordinators=coordinators),
        on_event=partial(_told, reporter),
        parts=parts,
    )
    own_figures = OwnFigures(engine, stage, directory.nodes_last_read, gpu=machine.driver_name)
    record = replace(
        first_record(transport.peer_id, engine, machine),
        joined_unix_s=transport.now(),
        **said_by_owner(arguments),
    )
    use = use_of(arguments)
    if not_seen := unseen(use):
        reporter.say(not_seen)
    peer = Peer(
        PeerCore(
            transport=transport,
            directory=directory,
            engine=engine,
            stage=stage,
            coordinator=coordinator,
            plans=plans,
            reporter=reporter,
        ),
        record=record,
        config=PeerConfig(
            follow=FollowConfig(pinned=pinned),
            use=use,
            balance=BalanceConfig(evens=arguments.balance),
        ),
        measured=measured,
        machine=MachineWatch(use, gpu=None if arguments.gpu is None else machine.driver_name),
        refined=own_figures.refined,
        parts=parts,
        budget=budget,
    )
    health.trouble = lambda: peer.trouble
    path = arguments.identity.expanduser().with_suffix(".contribution.json")
    watch = ContributionWatch(
        peer.figures,
        peer.with_others,
        lambda: stage.helped,
        reporter,
        path,
        lambda: own_figures.sensors,
    )

    def leave() -> None:
        arguments.moves_on = False
        peer.leave()

    with on_interrupt(leave):
        works = _works_beside(arguments, transport, directory, peer, reporter)
        await peer.run(watch.run, own_figures.watch_sensors, *works)


def _works_beside(
    arguments: argparse.Namespace,
    transport: "Transport",
    directory: "Directory",
    peer: "Peer",
    reporter: Reporter,
) -> "list[PartFunction]":
    """What runs beside the peer: remembering others, moving to another model, offering it here."""
    from coordinator.problem.model_pin import named_peers
    from dht.networks.mdns import advertise
    from node.peer.installed_watch import keep_looking
    from node.peer.inviting import keep_inviting, keep_offering
    from node.peer.remembering import keep_remembering
    from node.peer.roaming import RoamConfig, Roamer

    spec = peer.record.model

    def move(need: "Need") -> None:
        reporter.event("moving", model=need.model.name, start=need.start, end=need.end)
        reporter.say(f"{need.model.name} lost its last holder of some layers: moving there")
        arguments.moves_on = True
        peer.leave()

    allowed = wanted_models(arguments)
    config = RoamConfig()
    roamer = Roamer(
        transport,
        directory,
        lambda: peer.record,
        move,
        peer.is_spare,
        named=named_peers(arguments.initial_peers),
        allowed=allowed,
        stays_s=config.moved_s if arguments.moved else config.settled_s,
        config=config,
    )
    works: list[PartFunction] = [
        partial(keep_looking, reporter),
        partial(keep_remembering, arguments, transport, directory, spec, reporter),
        partial(keep_inviting, arguments, lambda: transport.addresses, spec, reporter),
    ]
    if len(allowed) > 1:
        works.append(roamer.run)
    if arguments.local:
        works.append(
            partial(
                keep_offering, arguments, lambda: transport.addresses, spec, reporter, advertise
            )
        )
    return works


def _told(reporter: Reporter, event: str, **fields: object) -> None:
    """Report an event of the coordinator. A missing plan is also told to people, who would
    otherwise see nothing happen."""
    reporter.event(event, **fields)
    if event == "no_plan":
        text = f"No plan for all layers now: {fields['reason']}. Waiting for that."
        reporter.stands("waiting", text)


run = command_of(parse, main)

if __name__ == "__main__":
    sys.exit(run())
