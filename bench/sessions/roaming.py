"""Volunteers of many models that come, go and move where they are needed, under a virtual clock.

Simulated: what a volunteer reads and decides is what ``node.join`` runs (the network's directory of
models, :func:`coordinator.plans.catalogue.need.needs`, :class:`node.peer.roaming.Roamer`, over the
in-memory network with signed records); placement within a model is a stand-in for its coordinator,
which gives layers that nobody holds to volunteers whose own layers others hold, and weights take as
long as a link of ``LINK_BYTES_PER_S`` needs. Volunteers stay for an hour on average and others come
in their place; once everybody who serves one of the models vanishes, and once all holders of a
layer of another. A loss is *taken* once volunteers load all that is missing, and over once they
serve it: 48 GB take half an hour over such a link, so a loss may be due after the run's end only.

What must not happen is that volunteers go back and forth: a return is a move to a model that the
volunteer had left before.
"""

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from safetensors.torch import save_file

from bench import report
from coordinator.planning.heuristics.heuristics import chains, keep_layers
from coordinator.plans.catalogue.need import Need, needs
from coordinator.plans.catalogue.reading import network_models, served_models
from coordinator.problem.from_records import problem_of
from dht.checkpoints.hub import served_name
from dht.checkpoints.model_files import MANIFEST, directory_root
from dht.messages.types import DeviceSpec, ModelRecord, ModelSpec, NodeRecord, NodeState
from dht.process.whole_file import write_whole
from dht.records.directory import Directory
from node.peer.announcer import RENEW_MODEL_S, RENEW_S
from node.peer.roaming import RoamConfig, Roamer
from node.weights.hashes import hash_shards
from testing.clock import run_virtual
from testing.local_swarm import ROOT
from testing.network import MemoryNetwork

NETWORK = "bench"
GB = 10**9
MODELS = {
    "small": (32, 0.44),
    "middle": (48, 1.2),
    "large": (64, 1.0),
    "larger": (80, 1.75),
    "largest": (94, 5.0),
}
"""Layers and gigabytes of a layer: the shapes of 8 B to 235 B parameters in bfloat16."""
MEMORY_GB = (8, 12, 16, 24, 24, 48)
LINK_BYTES_PER_S = 25e6
STAYS_S = 3600.0
PLANS_S = 10.0
CRASHES = 0.5
"""Part of the volunteers that leave without a word."""


def parse() -> argparse.Namespace:
    parser = report.parser_of("bench.sessions.roaming", __doc__)
    parser.add_argument("--peers", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def model_files(under: Path) -> dict[str, Path]:
    """Directories of all models, by name; each has weights of its own, and so a root."""
    found = {}
    for number, name in enumerate(MODELS):
        directory = under / name
        directory.mkdir()
        config = json.loads((ROOT / "models" / "brook" / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config))
        save_file({"w": torch.tensor([number])}, directory / "model.safetensors")
        hashes = hash_shards(directory, ("model.safetensors",))
        write_whole(directory / MANIFEST, msgspec.json.encode(hashes))
        found[name] = directory
    return found


def spec_of(directory: Path) -> ModelSpec:
    """The model in ``directory``, with the sizes that its name stands for."""
    layers, layer_gb = MODELS[directory.name]
    return ModelSpec(
        name=served_name(str(directory)),
        root=directory_root(directory),
        layers=layers,
        layer_bytes=int(layer_gb * GB),
        embed_bytes=int(layer_gb * GB),
        head_bytes=int(layer_gb * GB),
        kv_bytes_per_token_layer=4096,
        activation_bytes=8192,
        context_tokens=8192,
        vocab=128_000,
    )


@dataclass(slots=True)
class Told:
    """What happened, in seconds since all had joined."""

    moves: list[dict[str, Any]] = field(default_factory=list)
    left: int = 0
    joined: int = 0
    nowhere: int = 0
    """Volunteers that no model fitted."""
    losses: list[dict[str, Any]] = field(default_factory=list)
    planned: int = 0
    """Spans that the stand-in for a coordinator changed."""


class Volunteer:
    """One machine, its records and what it decides."""

    def __init__(self, world: "World", memory_bytes: int, allowed: list[Path]) -> None:
        self.world = world
        self.memory_bytes = memory_bytes
        self.allowed = [str(path) for path in allowed]
        self.transport = world.network.transport()
        self.record: NodeRecord | None = None
        self.been: list[str] = []
        self.serves_at_s = 0.0
        """When the layers that it holds or loads are loaded."""
        self._tasks: list[asyncio.Task[None]] = []
        self._loading: asyncio.Task[None] | None = None

    async def join(self) -> bool:
        """Serve what is needed most; False where nothing that is allowed fits."""
        specs = await network_models(self.transport, NETWORK)
        served = await served_models(self.transport, NETWORK, specs)
        names = {served_name(path) for path in self.allowed}
        fitting = [need for need in needs(served, self.memory_bytes) if need.model.name in names]
        if not fitting:
            return False
        await self.enter(fitting[0].model, fitting[0].start, fitting[0].end, RoamConfig().settled_s)
        return True

    async def enter(self, model: ModelSpec, start: int, end: int, stays_s: float) -> None:
        """Serve these layers of a model, and look where else this machine is needed."""
        self.been.append(model.name)
        self.record = NodeRecord(
            peer_id=self.transport.peer_id,
            name="volunteer",
            software_version="0",
            device=DeviceSpec(kind="cpu", name="paper", memory_bytes=self.memory_bytes),
            model=model,
            memory_bytes=self.memory_bytes,
            kv_tokens_min=0,
            tokens_per_s=(100.0,) * model.layers,
            state=NodeState.WAITING,
            joined_unix_s=self.transport.now(),
        )
        directory = Directory(self.transport, NETWORK, model.key)
        roamer = Roamer(
            self.transport,
            directory,
            lambda: self.record or self._gone(),
            self._move,
            self.is_spare,
            named=(),
            allowed=self.allowed,
            stays_s=stays_s,
        )
        self.take(start, end)
        self._tasks = [
            asyncio.create_task(self._announce(directory)),
            asyncio.create_task(self._announce_model()),
            asyncio.create_task(roamer.run()),
        ]

    def take(self, start: int, end: int) -> None:
        """Load layers, then serve them."""
        assert self.record is not None
        self.record = replace(self.record, state=NodeState.LOADING, start=start, end=end)
        if self._loading is not None:
            self._loading.cancel()
        self._loading = asyncio.create_task(self._load())

    async def _load(self) -> None:
        assert self.record is not None
        size = (self.record.end - self.record.start) * self.record.model.layer_bytes
        takes_s = size / LINK_BYTES_PER_S if self.world.settled else 1.0
        self.serves_at_s = self.world.now_s + takes_s
        await asyncio.sleep(takes_s)
        self.record = replace(self.record, state=NodeState.SERVING)

    async def _announce(self, directory: Directory) -> None:
        told, told_s, loop = None, -RENEW_S, asyncio.get_running_loop()
        while True:
            assert self.record is not None
            if self.record != told or loop.time() - told_s >= RENEW_S:
                told, told_s = self.record, loop.time()
                await directory.publish(told)
            await asyncio.sleep(5.0)

    async def _announce_model(self) -> None:
        assert self.record is not None
        models = Directory.of_models(self.transport, NETWORK)
        entry = ModelRecord(peer_id=self.transport.peer_id, model=self.record.model)
        while True:
            await models.publish(entry)
            await asyncio.sleep(RENEW_MODEL_S)

    async def is_spare(self) -> bool:
        """Whether others do hold this volunteer's layers."""
        return self.record is not None and self.world.spare(self)

    def _gone(self) -> NodeRecord:
        raise AssertionError("a volunteer without a record looks around")

    def _move(self, need: Need) -> None:
        self.world.spawn(self._moved(need))

    async def _moved(self, need: Need) -> None:
        assert self.record is not None
        self.world.note_move(self, need)
        await self._say_nothing_is_held()
        await self.stop()
        await self.enter(need.model, need.start, need.end, RoamConfig().moved_s)

    async def leave(self, *, crashes: bool) -> None:
        """End, as a crash does or with a word."""
        if not crashes and self.record is not None:
            await self._say_nothing_is_held()
        await self.stop()
        self.record = None
        await self.transport.close()

    async def _say_nothing_is_held(self) -> None:
        assert self.record is not None
        gone = replace(self.record, state=NodeState.DRAINING, start=0, end=0)
        await Directory(self.transport, NETWORK, gone.model.key).publish(gone)

    async def stop(self) -> None:
        """End what runs here."""
        tasks = [*self._tasks, *([self._loading] if self._loading else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class World:
    """All volunteers, and the stand-ins for the coordinators."""

    def __init__(self, seed: int, files: dict[str, Path]) -> None:
        self.rng = random.Random(seed)
        self.network = MemoryNetwork(random.Random(seed))
        self.files = files
        self.specs = {name: spec_of(directory) for name, directory in files.items()}
        self.volunteers: list[Volunteer] = []
        self.settled = False
        self.told = Told()
        self._spawned: set[asyncio.Task[None]] = set()
        self._open: dict[str, dict[str, Any]] = {}

    def spawn(self, work: Any) -> None:
        """Run something that nobody waits for; its failure ends the run."""
        task = asyncio.ensure_future(work)
        self._spawned.add(task)

        def ended(done: "asyncio.Task[None]") -> None:
            self._spawned.discard(done)
            if not done.cancelled():
                done.result()

        task.add_done_callback(ended)

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def join(self) -> None:
        """One more volunteer, which lends itself to some of the models."""
        memory = self.rng.choice(MEMORY_GB) * GB
        some = self.rng.sample(sorted(self.files), self.rng.randint(2, len(self.files)))
        volunteer = Volunteer(self, memory, [self.files[name] for name in some])
        if await volunteer.join():
            self.volunteers.append(volunteer)
            self.told.joined += self.settled
        else:
            self.told.nowhere += 1
            await volunteer.transport.close()

    async def leave(self, volunteer: Volunteer) -> None:
        """End one volunteer."""
        self.volunteers.remove(volunteer)
        self.told.left += 1
        await volunteer.leave(crashes=self.rng.random() < CRASHES)

    def of(self, name: str) -> list[Volunteer]:
        """The volunteers of one model."""
        return [v for v in self.volunteers if v.record is not None and v.record.model.name == name]

    def holders(self, name: str, *, loading: bool = False) -> list[int]:
        """Number of volunteers that do serve each layer; with ``loading``, or load it."""
        states = {NodeState.SERVING, NodeState.LOADING} if loading else {NodeState.SERVING}
        counts = [0] * self.specs[name].layers
        for volunteer in self.of(name):
            assert volunteer.record is not None
            if volunteer.record.state in states:
                for layer in range(volunteer.record.start, volunteer.record.end):
                    counts[layer] += 1
        return counts

    def spare(self, volunteer: Volunteer) -> bool:
        """Whether others serve all layers of this volunteer."""
        record = volunteer.record
        assert record is not None
        held = self.holders(record.model.name)[record.start : record.end]
        return min(held) >= 1 + (record.state is NodeState.SERVING)

    def plan(self, name: str) -> None:
        """Give layers that nobody serves or loads to volunteers that can be spared."""
        if min(self.holders(name, loading=True)):
            return
        here = {v.transport.peer_id: v for v in self.of(name)}
        records = {peer: v.record for peer, v in sorted(here.items()) if v.record is not None}
        problem = problem_of(self.specs[name], records, {})
        for span in keep_layers(problem) or chains(problem) or ():
            record = records[span.peer_id]
            volunteer = here[span.peer_id]
            if (record.start, record.end) != (span.start, span.end) and self.spare(volunteer):
                volunteer.take(span.start, span.end)
                self.told.planned += 1

    def note_move(self, volunteer: Volunteer, need: Need) -> None:
        """Write a move down."""
        assert volunteer.record is not None
        self.told.moves.append(
            {
                "at_s": round(self.now_s, 1),
                "peer": volunteer.transport.peer_id[-8:],
                "from": volunteer.record.model.name,
                "to": need.model.name,
                "returns": need.model.name in volunteer.been,
            }
        )

    def look(self) -> None:
        """Note when a model lost its last holder of a layer, and when it was whole again."""
        for name in self.specs:
            whole = min(self.holders(name)) > 0
            coming = min(self.holders(name, loading=True)) > 0
            loss = self._open.get(name)
            if not whole and loss is None:
                loss = {"model": name, "at_s": round(self.now_s, 1)}
                self._open[name] = loss
                self.told.losses.append(loss)
            if loss is not None and coming and "taken_after_s" not in loss:
                loss["taken_after_s"] = round(self.now_s - loss["at_s"], 1)
            if loss is not None and whole:
                loss["whole_after_s"] = round(self.now_s - loss["at_s"], 1)
                del self._open[name]

    def whole_at_s(self, name: str) -> float | None:
        """When every layer of a model will be served, if all go on to load; None: never."""
        soonest = [math.inf] * self.specs[name].layers
        for volunteer in self.of(name):
            assert volunteer.record is not None
            for layer in range(volunteer.record.start, volunteer.record.end):
                soonest[layer] = min(soonest[layer], volunteer.serves_at_s)
        return max(soonest) if max(soonest) < math.inf else None

    def note_due(self) -> None:
        """Note of what is lost still when it will be whole."""
        for name, loss in self._open.items():
            at_s = self.whole_at_s(name)
            loss["due_after_s"] = None if at_s is None else round(at_s - loss["at_s"], 1)

    async def every(self, seconds: float, work: Callable[[], Awaitable[None] | None]) -> None:
        """Do something again and again."""
        while True:
            await asyncio.sleep(seconds)
            done = work()
            if done is not None:
                await done

    async def close(self) -> None:
        """End all."""
        for volunteer in self.volunteers:
            await volunteer.leave(crashes=True)


async def vanish(world: World, name: str, layer: int | None) -> None:
    """Let all holders of a model's layer leave at once, or all that hold any."""
    for volunteer in world.of(name):
        assert volunteer.record is not None
        if layer is None or volunteer.record.start <= layer < volunteer.record.end:
            await world.leave(volunteer)


async def run(seed: int, peers: int, minutes: float, files: dict[str, Path]) -> Told:
    """One run."""
    world = World(seed, files)
    founders = [world.network.transport() for _ in files]
    for founder, spec in zip(founders, world.specs.values(), strict=True):
        entry = ModelRecord(peer_id=founder.peer_id, model=spec)
        await Directory.of_models(founder, NETWORK).publish(entry)
    for _ in range(peers):
        await world.join()
        await asyncio.sleep(0.2)
    await asyncio.sleep(60.0)

    async def churn() -> None:
        while True:
            await asyncio.sleep(world.rng.expovariate(peers / STAYS_S))
            await world.leave(world.rng.choice(world.volunteers))
            await world.join()

    async def plans() -> None:
        for name in world.specs:
            world.plan(name)

    world.settled = True
    began_s = world.now_s
    tasks = [
        asyncio.create_task(churn()),
        asyncio.create_task(world.every(PLANS_S, plans)),
        asyncio.create_task(world.every(1.0, world.look)),
    ]
    for name, layer in (("larger", None), ("largest", world.specs["largest"].layers // 2)):
        await asyncio.sleep(minutes * 60.0 / 4)
        await vanish(world, name, layer)
    await asyncio.sleep(minutes * 60.0 / 2)
    for task in tasks:
        task.cancel()
    world.note_due()
    for each in [*world.told.moves, *world.told.losses]:
        each["at_s"] = round(each["at_s"] - began_s, 1)
    await world.close()
    return world.told


def summary(told: Told) -> dict[str, Any]:
    """The figures that count."""
    moves = Counter(move["peer"] for move in told.moves)
    return {
        "left": told.left,
        "joined": told.joined,
        "nowhere": told.nowhere,
        "moves": len(told.moves),
        "moves_of_one_max": max(moves.values(), default=0),
        "returns": sum(move["returns"] for move in told.moves),
        "planned": told.planned,
        "losses": len(told.losses),
        "never_whole": sum(
            "whole_after_s" not in loss and loss["due_after_s"] is None for loss in told.losses
        ),
        "loading_at_the_end": sum(loss.get("due_after_s") is not None for loss in told.losses),
        "taken_after_s_max": max(
            (loss.get("taken_after_s", math.inf) for loss in told.losses), default=0.0
        ),
    }


def main() -> int:
    arguments = parse()
    with tempfile.TemporaryDirectory() as under:
        files = model_files(Path(under))
        lived = run(arguments.seed, arguments.peers, arguments.minutes, files)
        told = run_virtual(lived, limit_s=math.inf)
    result = {
        **report.provenance(arguments.seed),
        "simulated": True,
        "peers": arguments.peers,
        "minutes": arguments.minutes,
        "link_bytes_per_s": LINK_BYTES_PER_S,
        "summary": summary(told),
        "moves": told.moves,
        "losses": told.losses,
    }
    report.write(arguments.out, result)
    Console().print({key: result[key] for key in ("summary", "moves", "losses")})
    return 1 if result["summary"]["returns"] else 0


if __name__ == "__main__":
    sys.exit(main())
