"""Three stages with a stand-in engine, and who asks them: what :mod:`bench.papers.links` serves.

The setting is MoLink's (EMNLP Findings 2025, §4): a model with Qwen-7B's shapes on RTX 4090s,
requests from the Azure conversation trace at Poisson arrivals. Sessions, stages, hops and link
schedulers are the project's own; the engine waits as long as the GPU would and sends activations of
the true size (:mod:`testing.timed_engine`).
"""

import asyncio
import csv
import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace

from bench.papers.link_policies import DecodeProfile, InOrder, MoLink
from client import Swarm, SwarmConfig
from client.text.tokenizer import ModelText
from coordinator.policies.batching.scheduler import BatchLimits
from coordinator.policies.failure.detector import WatchConfig
from coordinator.policies.links.scheduler import LinkScheduler
from dht.identity.peer_id import Identity
from dht.messages.types import DeviceSpec, ModelSpec, NodeRecord, NodeState
from dht.records.directory import Directory
from dht.transport.interface import Transport
from node.links.hops import HopConfig
from node.stage.config import StageConfig, StageEngine
from node.stage.server import StageServer
from node.stage.streams import StageStreams
from testing.clock import run_virtual
from testing.network import LinkModel, MemoryNetwork, MemoryTransport
from testing.paths import ROOT
from testing.timed_engine import GpuTimes, TimedEngine

MBIT = 125_000.0
TRACE = ROOT / "bench" / "data" / "azure" / "conversations_2023.csv"
NETWORK = "wan"
WHOLE_PROMPT = 1 << 12

QWEN_7B = ModelSpec(
    name="qwen-7b-shapes",
    root="stand-in",
    layers=32,
    layer_bytes=1,
    embed_bytes=1,
    head_bytes=1,
    kv_bytes_per_token_layer=1,
    activation_bytes=4096 * 2,
    context_tokens=8192,
    vocab=1000,
)
QWEN_7B_GQA = replace(QWEN_7B, name="qwen-7b-gqa", kv_bytes_per_token_layer=2 * 8 * 128 * 2)
"""The same with grouped-query attention, 8 of 32 heads, and its KV's true size."""


def spans_of(stages: int) -> tuple[tuple[int, int], ...]:
    """The spans of so many stages, as even as may be, the first the longest."""
    ends = [-(-QWEN_7B.layers * at // stages) for at in range(stages + 1)]
    return tuple(itertools.pairwise(ends))


SPANS = spans_of(3)
RTX_4090 = GpuTimes(step_s=5e-3, decode_s=2e-5, prefill_s=4.7e-5)
"""A third of 15 GB of fp16 weights at 1 TB/s; a third of 14 GFLOP a token at 100 TFLOP/s."""
KV_TOKENS = 100_000
ANNOUNCE_S = 10.0
PATIENT = WatchConfig(least_s=600.0, most_s=600.0)
"""Under ``fifo`` a ping waits behind whole prompts: nobody is given up for it here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One cell of the table."""

    policy: str
    requests_per_s: float = 0.3
    mbit: float = 100.0
    delay_s: float = 0.03
    decodes_max: int = 256
    micro_batches: bool = True
    """Whether stages choose how many decodes a step takes, up to ``decodes_max``."""
    stages: int = 3
    gpu_step_s: float = 5e-3
    gpu_decode_s: float = RTX_4090.decode_s
    seconds: float = 300.0
    seed: int = 1

    @property
    def chunk_tokens(self) -> int | None:
        whole = self.policy in ("fifo", "molink")
        return WHOLE_PROMPT if whole else None

    @property
    def limits(self) -> BatchLimits:
        return BatchLimits(
            decodes_max=self.decodes_max,
            prefill_tokens_max=max(256, self.chunk_tokens or 0),
            row_share=self.times.decode_s / self.times.step_s if self.micro_batches else 0.0,
        )

    @property
    def times(self) -> GpuTimes:
        return replace(RTX_4090, step_s=self.gpu_step_s, decode_s=self.gpu_decode_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    at_s: float
    prompt_tokens: int
    new_tokens: int


def requests(setting: Setting) -> list[Request]:
    """Poisson arrivals; lengths drawn from the trace (4 ≤ input ≤ 2048, 4 ≤ output ≤ 1024)."""
    with TRACE.open() as file:
        rows = [(int(r["input_tokens"]), int(r["output_tokens"])) for r in csv.DictReader(file)]
    lengths = [(i, o) for i, o in rows if 4 <= i <= 2048 and 4 <= o <= 1024]
    rng = random.Random(setting.seed)
    found, at_s = [], 0.0
    while (at_s := at_s + rng.expovariate(setting.requests_per_s)) < setting.seconds:
        prompt, new = rng.choice(lengths)
        found.append(Request(at_s=at_s, prompt_tokens=prompt, new_tokens=new))
    return found


@dataclass(slots=True, kw_only=True)
class StandInPeer:
    """A stage that serves, and what it stands on."""

    transport: Transport
    stage: StageServer
    engine: StageEngine
    record: NodeRecord
    directory: Directory
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    async def keep_announced(self) -> None:
        """Tell others of ``record`` every so often."""
        while True:
            await self.directory.publish(self.record)
            await asyncio.sleep(ANNOUNCE_S)

    async def close(self) -> None:
        """End what was started."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.stage.close("the benchmark ended")
        await self.transport.close()


async def serving(
    transport: Transport,
    span: tuple[int, int],
    spec: ModelSpec,
    times: GpuTimes,
    limits: BatchLimits,
    config: StageConfig,
    *,
    kv_tokens: int = KV_TOKENS,
    engine_class: type[TimedEngine] = TimedEngine,
    bandwidth_from: Callable[[str], float | None] = lambda peer_id: None,
) -> StandInPeer:
    """Serve layers ``span`` of ``spec`` on ``transport`` with an engine that only waits.

    ``bandwidth_from``: what it knows of its links, in bytes/s; by default nothing.
    """
    engine = engine_class(spec, span, times, kv_tokens=kv_tokens, limits=limits)
    return await served_by(engine, transport, span, spec, config, bandwidth_from=bandwidth_from)


async def served_by(
    engine: StageEngine,
    transport: Transport,
    span: tuple[int, int],
    spec: ModelSpec,
    config: StageConfig,
    *,
    bandwidth_from: Callable[[str], float | None] = lambda peer_id: None,
) -> StandInPeer:
    """Serve layers ``span`` of ``spec`` on ``transport`` with any engine that holds them."""
    directory = Directory(transport, NETWORK, spec.key)
    stage = StageServer(
        transport,
        engine,
        config,
        addresses_of=directory.addresses_of,
        bandwidth_from=bandwidth_from,
    )
    await StageStreams(transport, stage).start()
    peer = StandInPeer(
        transport=transport,
        stage=stage,
        engine=engine,
        record=NodeRecord(
            peer_id=transport.peer_id,
            name="stand-in",
            software_version="0",
            device=DeviceSpec(kind="cuda", name="RTX 4090 (stand-in)", memory_bytes=1),
            model=spec,
            memory_bytes=1,
            kv_tokens_min=1,
            kv_tokens_free=engine.kv_tokens,
            tokens_per_s=(100.0,) * spec.layers,
            state=NodeState.SERVING,
            start=span[0],
            end=span[1],
            joined_unix_s=transport.now(),
        ),
        directory=directory,
    )
    peer.tasks = [asyncio.create_task(stage.run()), asyncio.create_task(peer.keep_announced())]
    return peer


async def stand_in_peer(
    transport: Transport, span: tuple[int, int], setting: Setting
) -> StandInPeer:
    """Serve layers ``span`` on ``transport`` as the setting says."""
    profile = decode_profile(setting)
    schedulers: dict[str, Callable[[], LinkScheduler]] = {
        "fifo": InOrder,
        "molink": lambda: MoLink(profile, row_bytes=QWEN_7B.activation_bytes),
        "anabranch": LinkScheduler,
    }
    config = StageConfig(
        chunk_tokens=setting.chunk_tokens,
        idle_s=600.0,
        int8="prefill" if setting.policy.endswith("+int8") else "off",
        hops=HopConfig(scheduler=schedulers[setting.policy.split("+")[0]], watch=PATIENT),
    )
    engine = TimedEngine(QWEN_7B, span, setting.times, kv_tokens=KV_TOKENS, limits=setting.limits)
    peer = await served_by(engine, transport, span, QWEN_7B, config)
    profile.running = lambda: _in_us(engine.decoding)
    await asyncio.sleep(0.1)
    return peer


def decode_profile(setting: Setting) -> DecodeProfile:
    """What profiles tell MoLink's senders of the setting."""
    return DecodeProfile(
        decode_us=lambda count: setting.times.of(count, 0) * 1e6,
        stages=setting.stages,
        hop_us=setting.delay_s * 1e6,
        row_us=QWEN_7B.activation_bytes / (setting.mbit * MBIT) * 1e6,
    )


def _in_us(run: tuple[float, int] | None) -> tuple[float, int] | None:
    return None if run is None else (run[0] * 1e6, run[1])


def client_of(
    transport: Transport, spec: ModelSpec = QWEN_7B
) -> AbstractAsyncContextManager[Swarm]:
    """A client that waits for as long as it takes."""
    config = SwarmConfig(network=NETWORK, wait_s=600)
    return Swarm.over(transport, ModelText(name=spec.name), config)


def join_peers(
    network: MemoryNetwork, peers: Sequence[StandInPeer], mbit: float, delay_s: float
) -> None:
    """Give every link between the peers this bandwidth and delay."""
    link = LinkModel(
        delay_s=delay_s,
        bandwidth_bytes_per_s=mbit * MBIT,
        unread_bytes_max=4 << 20,  # what the p2p daemon takes before a writer waits
    )
    for one, other in itertools.permutations(peers, 2):
        network.set_link(one.transport.peer_id, other.transport.peer_id, link)


def join_client(
    network: MemoryNetwork, client_id: str, peers: Sequence[StandInPeer], delay_s: float
) -> None:
    """Give a client links to all peers, either way, with no limit but this delay."""
    near = LinkModel(delay_s=delay_s)
    for peer in peers:
        network.set_link(client_id, peer.transport.peer_id, near)
        network.set_link(peer.transport.peer_id, client_id, near)


class StandInSwarm:
    """Stages over links of one shape, and a client close to all of them."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.network = MemoryNetwork(random.Random(setting.seed))
        self.peers: list[StandInPeer] = []

    async def __aenter__(self) -> "StandInSwarm":
        for span in spans_of(self.setting.stages):
            self.peers.append(await stand_in_peer(self._transport(), span, self.setting))
        self.shape(self.setting.mbit)
        self._connected = client_of(self._transport())
        self.client = await self._connected.__aenter__()
        return self

    def _transport(self) -> MemoryTransport:
        return self.network.transport(Identity(self.network.rng.randbytes(32)))

    def shape(self, mbit: float) -> None:
        """Give every link between stages this bandwidth."""
        join_peers(self.network, self.peers, mbit, self.setting.delay_s)

    async def __aexit__(self, *_: object) -> None:
        await self._connected.__aexit__(None, None, None)
        for peer in self.peers:
            await peer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    request: Request
    started_s: float
    ttft_s: float
    tpot_s: float
    latency_s: float


async def ask(client: Swarm, request: Request) -> Served:
    """Send ``request`` at its time and take the whole answer."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(request.at_s)
    started_s = loop.time()
    answer = await client.generate(
        (1,) * request.prompt_tokens,
        max_new_tokens=request.new_tokens,
        ignore_eos=True,
        speculate=False,
    )
    assert len(answer.token_ids) == request.new_tokens
    assert answer.failovers == 0, "a stage was lost in a benchmark of links"
    return Served(
        request=request,
        started_s=started_s,
        ttft_s=answer.ttft_s,
        tpot_s=answer.tpot_s,
        latency_s=loop.time() - started_s,
    )


def serve(setting: Setting) -> list[Served]:
    """Serve the setting's requests; all of them end."""

    async def run() -> list[Served]:
        async with StandInSwarm(setting) as swarm:
            return list(await asyncio.gather(*(ask(swarm.client, r) for r in requests(setting))))

    return run_virtual(run(), limit_s=100_000)


def floor(setting: Setting) -> dict[str, float]:
    """What physics leaves: a lone request's mean TTFT and TPOT without any waiting, in seconds."""
    served = requests(setting)
    rate = setting.mbit * MBIT
    row_s = QWEN_7B.activation_bytes / rate
    # A prompt crosses two links one after the other, a row behind the other at best.
    ttft = [
        2 * setting.delay_s
        + r.prompt_tokens * max(row_s, RTX_4090.prefill_s)
        + row_s
        + 3 * RTX_4090.step_s
        for r in served
    ]
    tpot_s = 3 * setting.delay_s + 3 * RTX_4090.step_s + 2 * row_s
    return {"ttft_s": statistics.fmean(ttft), "tpot_s": tpot_s}


def summary(served: Sequence[Served]) -> dict[str, float]:
    """Mean and 95th percentile of what people wait for, in seconds."""

    def of(name: str, values: list[float]) -> Iterator[tuple[str, float]]:
        yield f"{name}_mean_s", statistics.fmean(values)
        yield f"{name}_p95_s", statistics.quantiles(values, n=20)[-1]

    return {
        "requests": len(served),
        **dict(of("ttft", [s.ttft_s for s in served])),
        **dict(of("tpot", [s.tpot_s for s in served if s.request.new_tokens > 1])),
        **dict(of("latency", [s.latency_s for s in served])),
    }
