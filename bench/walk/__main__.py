"""Which functions and files a prompt, a plan and a load of weights run through.

    python -m bench walk [--out bench/results/walk.json] [--list]

- ``prompt``: brook on three stages within this process, with real engines. From ``Swarm.stream`` to
  the first token, once the first prompt was answered. Counted is what runs for each of eight
  prompts, and not while nobody asks, as records and pings do.
- ``plan``: a solve of a cluster of 18 peers (:mod:`bench.planner.clusters`), the first one.
- ``weights``: brook's files opened, and all layers loaded into an engine.

A function counts for the client or the stage whose code called it, however deep; so do those of
``coordinator/`` and ``dht/``. Functions within functions count with the outer one, and generated
ones, as of dataclasses, not at all.
"""

import asyncio
import itertools
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from bench.planner.clusters import load
from bench.report import parser_of, provenance, write
from client import Swarm, SwarmConfig
from client.text.tokenizer import ModelText
from coordinator.planning.solve import SolveRequest, solve_request
from dht.identity.peer_id import Identity
from dht.messages.types import PlanVersion
from node.engine.engine import Engine, EngineConfig
from node.stage.config import StageConfig
from node.stage.local_engine import LocalEngine
from node.weights.store import WeightStore
from testing.network import MemoryNetwork
from testing.paths import ROOT
from testing.stand_in import NETWORK, served_by

ROOMS = ("client", "coordinator", "dht", "node")
BROOK = ROOT / "models" / "brook"
MEMORY_BYTES = 1 << 30
SIDES = {"client": "client", "node": "stage"}
CLUSTER, PEERS = "helix-00", 18
TURNS = 40
"""Looks at the clock until a solve's time counts as gone: the same work on any machine."""
STAGES, PROMPTS = 3, 8
"""What runs for each of the prompts counts: what else a client and its peers do comes and goes."""
IDLE_S = 2.5
"""Time without a prompt: the client reads records every two seconds, and pings oftener."""

Function = tuple[str, str]
"""A file below the root, and the outermost function there."""


class Walk:
    """The functions that ran while it was :meth:`watching`, in all threads, and for whom."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, Function]] = set()
        self._on = False
        self._names: dict[Any, Function | None] = {}

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Threads that start within this are watched, too."""
        threading.setprofile(self._profile)
        try:
            yield
        finally:
            threading.setprofile(None)

    @contextmanager
    def watching(self) -> Iterator[set[tuple[str, Function]]]:
        """Functions that run within this are in the set that it gives."""
        self.seen, self._on = set(), True
        sys.setprofile(self._profile)
        try:
            yield self.seen
        finally:
            sys.setprofile(None)
            self._on = False

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if self._on and event == "call" and (found := self._function(frame)) is not None:
            self.seen.add((self._side(frame), found))

    def _function(self, frame: FrameType) -> Function | None:
        """The function of a frame, if it is the product's."""
        code = frame.f_code
        if code not in self._names:  # a name is looked up once: this runs at every call
            path = Path(code.co_filename)
            name = code.co_qualname.split(".<locals>")[0]
            if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ROOMS:
                self._names[code] = (path.relative_to(ROOT).as_posix(), name)
            else:
                self._names[code] = None
        return self._names[code]

    def _side(self, frame: FrameType | None) -> str:
        """The side of the nearest caller that has one; else whether this is planning."""
        plans = False
        while frame is not None:
            if (found := self._function(frame)) is not None:
                room = found[0].split("/")[0]
                if room in SIDES:
                    return SIDES[room]
                plans |= room == "coordinator"
            frame = frame.f_back
        return "planner" if plans else "network"


async def prompt(walk: Walk) -> set[tuple[str, Function]]:
    """What ran for a prompt and did not run while there was none."""
    network = MemoryNetwork(random.Random(1))
    text = ModelText.load("brook", BROOK, "")
    store = WeightStore.open(str(BROOK))
    peers, engines = [], []
    layers = store.config["num_hidden_layers"]
    cuts = [layers * number // STAGES for number in range(STAGES + 1)]
    with walk.threads(), tempfile.TemporaryDirectory() as profiles:
        for start, end in itertools.pairwise(cuts):
            engine = await LocalEngine.open(
                EngineConfig(store=store, name="brook", memory_bytes=MEMORY_BYTES, threads=1),
                profiles=Path(profiles),
            )
            await engine.load(start, end, lambda *_: None)
            engine.start_serving(start, end)
            engines.append(engine)
            transport = network.transport(Identity(network.rng.randbytes(32)))
            peers.append(
                await served_by(engine, transport, (start, end), engine.spec, StageConfig())
            )
        transport = network.transport(Identity(network.rng.randbytes(32)))
        async with Swarm.over(transport, text, SwarmConfig(network=NETWORK)) as swarm:
            await first_token(swarm, "Once upon a time there was")
            with walk.watching() as idle:
                await asyncio.sleep(IDLE_S)
            asked = []
            for number in range(PROMPTS):
                with walk.watching() as seen:
                    await first_token(swarm, f"One rainy morning, {number} birds")
                asked.append(seen)
        for peer, engine in zip(peers, engines, strict=True):
            await peer.close()
            engine.close()
    return set.intersection(*asked) - idle


async def first_token(swarm: Swarm, text: str) -> None:
    """Ask, and leave after the first piece."""
    pieces = swarm.stream(text, max_new_tokens=8, speculate=False)
    await anext(pieces)
    await pieces.aclose()


def plan(walk: Walk) -> set[tuple[str, Function]]:
    """What ran for a coordinator's first plan of a cluster, in a fixed number of turns."""
    problem, _ = load(CLUSTER)
    assert len(problem.nodes) == PEERS
    turns = itertools.count()
    request = SolveRequest(
        problem=problem,
        version=PlanVersion(term=1, counter=1),
        coordinator="bench",
        time_limit_s=1.0,
        seed=0,
        now_unix_s=0.0,
    )
    with walk.watching() as seen:
        answer = solve_request(request, lambda: next(turns) / TURNS)
    assert answer.best is not None, answer.error
    return seen


def weights(walk: Walk) -> set[tuple[str, Function]]:
    """What ran to open brook's files and to load all layers."""
    with walk.watching() as seen:
        store = WeightStore.open(str(BROOK))
        engine = Engine(EngineConfig(store=store, name="brook", memory_bytes=MEMORY_BYTES))
        engine.load(0, engine.spec.layers)
    return seen


def counted(seen: set[tuple[str, Function]]) -> dict[str, Any]:
    """Functions and files by side, and functions by package."""
    rows: dict[str, Any] = {}
    for side in sorted({side for side, _ in seen}):
        functions = {function for each, function in seen if each == side}
        packages = Counter(str(Path(path).parent) for path, _ in functions)
        rows[side] = {
            "functions": len(functions),
            "files": len({path for path, _ in functions}),
            "packages": dict(sorted(packages.items())),
        }
    return rows


def main() -> None:
    parser = parser_of("bench.walk", __doc__)
    parser.add_argument("--list", action="store_true", help="print every function")
    arguments = parser.parse_args()
    walks: dict[str, Callable[[Walk], set[tuple[str, Function]]]] = {
        "prompt": lambda walk: asyncio.run(prompt(walk)),
        "plan": plan,
        "weights": weights,
    }
    result = provenance(seed=1)
    for name, run in walks.items():
        seen = run(Walk())
        result[name] = counted(seen)
        for side, row in result[name].items():
            print(
                f"{name}, {side}: {row['functions']} functions in {row['files']} files", flush=True
            )
        if arguments.list:
            print(*sorted(f"  {side:8} {path}: {of}" for side, (path, of) in seen), sep="\n")
    write(arguments.out, result)


if __name__ == "__main__":
    main()
