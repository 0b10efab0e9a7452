"""``node.join --test``: what this peer would do in the swarm, without serving anybody."""

from coordinator.self_help import span_to_take
from dht.directory import Directory
from dht.errors import NetworkError
from dht.transport import Transport
from dht.types import NodeRecord, NodeState, model_key
from node import VERSION
from node.hardware import Machine
from node.probe import measure_link
from node.report import Reporter
from node.stage_engine import EngineStage

LINKS_MAX = 8


async def rehearse(
    transport: Transport,
    network: str,
    engine: EngineStage,
    machine: Machine,
    reporter: Reporter,
) -> None:
    """Look at the swarm, measure links from it, and say which layers would be taken.

    Nothing is announced. Raises NetworkError when the swarm cannot be read.
    """
    spec = engine.spec
    nodes = await Directory(transport, network, model_key(spec.name)).nodes()
    record = NodeRecord(
        peer_id=transport.peer_id,
        name="",
        version=VERSION,
        device=machine.device,
        model=spec,
        memory_bytes=machine.lend_bytes,
        kv_tokens_min=engine.kv_tokens_min,
        tokens_per_s=engine.tokens_per_s,
        decode_layer_s=engine.profile.decode_times,
        prompt_layer_s=engine.profile.prompt_times,
        precision=engine.precision,
        state=NodeState.WAITING,
    )
    same = {key: each for key, each in nodes.items() if each.model.fingerprint == spec.fingerprint}
    reporter.say(f"{len(same)} peers of the swarm serve these weights, {len(nodes)} this name")
    for peer_id, each in list(same.items())[:LINKS_MAX]:
        try:
            link = await measure_link(transport, peer_id, each.addresses)
        except NetworkError as error:
            reporter.say(f"  {peer_id[-8:]} cannot be reached from here: {error}")
            continue
        megabits = link.bandwidth_bytes_per_s * 8 / 1e6
        reporter.say(f"  {peer_id[-8:]}: {1000 * link.rtt_s:.1f} ms, {megabits:.0f} Mbit/s from it")
    span = span_to_take(record, nodes)
    if span is None:
        reporter.say("No layers of this model fit: lend more with --memory")
        reporter.event("test", peers=len(same), start=0, end=0)
        return
    speed = engine.tokens_per_s[span.end - span.start - 1]
    reporter.say(
        f"The layers that need it the most are {span.start} to {span.end - 1} of {spec.layers}:"
        f" it would serve them at {speed:.0f} tokens/s. A coordinator may plan otherwise."
    )
    reporter.event("test", peers=len(same), start=span.start, end=span.end, tokens_per_s=speed)
    reporter.say("This was a test: nobody was served, nothing was announced.")
