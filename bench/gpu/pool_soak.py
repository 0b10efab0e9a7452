"""Thousands of short sessions through one engine.

Each opens, runs a prompt and a few tokens, and ends in one of the ways in which sessions end:
closed after its answer, cancelled in the middle, refused for want of room. Afterwards every page
must be free, and the process may not have grown.
"""

import random
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from bench.report import parser_of, provenance, write
from dht.messages.prefix import BLOCK_TOKENS, block_names
from dht.messages.session import Sampling
from node.engine.engine import Engine, EngineConfig, WorkItem
from node.kv.page_names import PageNames
from node.weights.store import WeightStore
from testing.random_model import make_llama
from tests.unit.node.kv.accounts import check_pool

SESSIONS = 10_000
LIVE = 16
"""Sessions at a time."""
WARM_UP_SHARE = 0.1
"""Share of the sessions before the first look at the memory, in which allocators fill their
caches."""
SEED = 0
LAYERS, VOCAB = 2, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Soaked:
    """What was seen."""

    sessions: int
    refused: int
    cancelled: int
    steps: int
    grown_bytes: int
    """Resident memory behind the last session less that after warming up."""
    grown_device_bytes: int
    """The same of the device's memory; 0 on a CPU."""
    free_tokens_before: int
    free_tokens_after: int


def device_bytes(device: torch.device) -> int:
    """Memory that torch holds on a device."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def soak(
    directory: Path, sessions: int, *, keep_prefixes: bool = False, device: str = "cpu"
) -> Soaked:
    """Run ``sessions`` sessions; raises AssertionError where pages do not add up."""
    chance = random.Random(SEED)
    store = WeightStore.open(str(directory))
    engine = Engine(
        EngineConfig(
            store=store,
            name="soak",
            device=device,
            memory_bytes=1_500_000,
            keep_prefixes=keep_prefixes,
        )
    )
    engine.load(0, LAYERS)
    before = engine.kv.free_tokens
    process = psutil.Process()
    live: dict[str, tuple[int, tuple[int, ...]]] = {}
    """Where a session stands and what it runs next."""
    lengths: dict[str, int] = {}
    opened = refused = cancelled = steps = 0
    warm_bytes = warm_device_bytes = 0
    while opened < sessions or live:
        while len(live) < LIVE and opened < sessions:
            opened += 1
            if opened == int(sessions * WARM_UP_SHARE):
                warm_bytes = process.memory_info().rss
                warm_device_bytes = device_bytes(engine.device)
            name, prompt = str(opened), chance.randint(1, 30)
            length = prompt + chance.randint(1, 8)
            ids = [chance.randrange(4)] * BLOCK_TOKENS  # few beginnings
            ids = [*ids[:prompt], *(chance.randrange(VOCAB) for _ in range(prompt - len(ids)))]
            blocks = b"".join(block_names(b"", ids))
            names = PageNames(space=b"soak", blocks=blocks, answers=name, found_most=prompt - 1)
            asked = before + 1 if chance.random() < 0.02 else length
            found = engine.kv.open(name, asked, (0, LAYERS), asked, names)
            if not engine.kv.extend(name, asked):
                engine.kv.free(name)
                refused += 1
                continue
            live[name] = found, tuple(ids[found:])
            lengths[name] = length
        items = [
            WorkItem(
                session=name, start=0, end=LAYERS, position=position,
                token_ids=ids, sampling=Sampling(),
            )
            for name, (position, ids) in live.items()
        ]  # fmt: skip
        steps += 1
        for result in engine.step(items):
            name = result.item.session
            assert result.error is None, result.error
            stands = result.item.position + result.item.tokens
            leaves = chance.random() < 0.05
            if stands >= lengths[name] or leaves:
                cancelled += leaves
                engine.kv.free(name)
                del live[name], lengths[name]
            else:
                live[name] = stands, (result.token_id or 0,)
    check_pool(engine.kv)
    grown_bytes = process.memory_info().rss - warm_bytes
    return Soaked(
        sessions=opened, refused=refused, cancelled=cancelled, steps=steps,
        grown_bytes=grown_bytes,
        grown_device_bytes=device_bytes(engine.device) - warm_device_bytes,
        free_tokens_before=before, free_tokens_after=engine.kv.free_tokens,
    )  # fmt: skip


def main() -> int:
    """Soak, print, and write the result."""
    parser = parser_of("bench.gpu.pool_soak", __doc__)
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--device", default="cpu", help="such as cuda:0 (cpu)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        directory = make_llama(Path(made), hidden=64, layers=LAYERS, vocab=VOCAB)
        found = {
            name: asdict(
                soak(directory, arguments.sessions, keep_prefixes=keeps, device=arguments.device)
            )
            for name, keeps in (("own_pages", False), ("kept_prefixes", True))
        }
    for name, figures in found.items():
        print(f"{name}: {figures}")
    write(arguments.out, {**provenance(SEED), **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
