"""``node.join --test``: shows what this peer would do in the swarm, without serving anybody."""

import asyncio
from collections.abc import Mapping

from coordinator.planning.heuristics.uncoordinated import span_to_take
from dht.errors import NetworkError
from dht.identity.peer_id import short_name
from dht.messages.types import NodeRecord, Reach, layers_text, model_key
from dht.records.directory import Directory
from dht.transport.interface import Transport
from node.device.hardware import Machine
from node.links.dial_back_findings import Findings
from node.links.probe import measure_link
from node.links.reachability import ask_back, greeter
from node.links.relay_slots import relay_candidates
from node.owner.reporter import Reporter
from node.peer.own_figures import first_record
from node.stage.local_engine import LocalEngine

LINKS_MAX = 8


async def rehearse(
    transport: Transport,
    network: str,
    engine: LocalEngine,
    machine: Machine,
    reporter: Reporter,
    *,
    host: str,
    port: int,
) -> None:
    """Look at the swarm, measure links from it, have ``port`` dialled back, and say which layers
    this peer would take.

    Nothing is announced. Raises NetworkError if the swarm cannot be read, and UserError if it
    cannot listen on ``host`` and ``port``.
    """
    spec = engine.spec
    nodes = await Directory(transport, network, model_key(spec.name)).nodes()
    same = {key: each for key, each in nodes.items() if each.model.serves_with(spec)}
    reporter.say(f"Peers under this name: {len(nodes)}; with these very weights: {len(same)}")
    for peer_id, each in list(same.items())[:LINKS_MAX]:
        try:
            link = await measure_link(transport, peer_id, each.addresses)
        except NetworkError as error:
            reporter.say(f"  {short_name(peer_id)} cannot be reached from here: {error}")
            continue
        megabits = link.bandwidth_bytes_per_s * 8 / 1e6
        reporter.say(
            f"  {short_name(peer_id)}: {1000 * link.rtt_s:.1f} ms, {megabits:.0f} Mbit/s from it"
        )
    reach, sentence = await dialled_back(transport, nodes, host, port)
    reporter.say(sentence)
    span = span_to_take(first_record(transport.peer_id, engine, machine), nodes)
    if span is None:
        reporter.say("No layers of this model fit: lend more with --memory")
        reporter.event("test", peers=len(same), reach=str(reach), start=0, end=0)
        return
    speed = engine.tokens_per_s[span.end - span.start - 1]
    reporter.say(
        f"Needed most: {layers_text((span.start, span.end))} of {spec.layers}; it would serve them"
        f" at {speed:.0f} tokens/s. A coordinator may plan otherwise."
    )
    reporter.event(
        "test",
        peers=len(same),
        reach=str(reach),
        start=span.start,
        end=span.end,
        tokens_per_s=speed,
    )
    reporter.say("This was a test: nobody was served, nothing was announced.")


async def dialled_back(
    transport: Transport, nodes: Mapping[str, NodeRecord], host: str, port: int
) -> tuple[Reach, str]:
    """Have some of these peers dial this machine: how it is reached, and a sentence on that.

    Raises UserError if it cannot listen on ``host`` and ``port``.
    """
    if not nodes.keys() - {transport.peer_id}:
        told = "Nobody is there to dial this machine back; --initial-peers names somebody"
        return Reach.UNKNOWN, told
    findings = Findings()
    asked = sorted(nodes.keys() - {transport.peer_id})[: findings.config.newest]
    async with greeter(host, port) as listened:
        said = await asyncio.gather(
            *(ask_back(transport, p, nodes[p].addresses, listened) for p in asked)
        )
    for peer_id, answer in zip(asked, said, strict=True):
        findings.note(peer_id, answer, 0.0)
    through, failed = findings.counts
    may_relay = bool(relay_candidates(nodes, transport.peer_id))
    sentence = reach_sentence(through, through + failed, listened, may_relay=may_relay)
    if not through + failed:
        return Reach.UNKNOWN, sentence
    if through:
        return Reach.DIRECT, sentence
    return (Reach.RELAYED if may_relay else Reach.NONE), sentence


def reach_sentence(through: int, dialled: int, port: int, *, may_relay: bool) -> str:
    """A sentence for the owner: how many peers got through, and what to do about it."""
    if not dialled:
        return f"No peer could say whether others reach port {port}: try again in a minute"
    count = f"{through} of {dialled} peer{'' if dialled == 1 else 's'} that dialled port {port}"
    if through:
        return f"Others reach this machine: {count} got through, nothing to do"
    rest = (
        "otherwise it joins through a relay, which is slower"
        if may_relay
        else "no peer here can relay for it, so without that it gets no layers"
    )
    return (
        f"Others do not reach this machine: {count} got through. Forward a TCP port on the router,"
        f" open it in the firewall and name it with --port; {rest}"
    )
