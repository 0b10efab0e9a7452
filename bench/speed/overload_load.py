"""The load of :mod:`bench.speed.overload`: processes that ask, each with a connection of its own.

One process cannot stand for a crowd: what it is late with, it would blame on the swarm. So several
ask, in front of the peers in the scheduler's eyes, and say how late they began what was due.
"""

import asyncio
import multiprocessing
import random
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from client import Swarm, UnavailableError
from client.answer.answer import PrefixCache
from client.swarm.swarm import SwarmConfig
from dht.errors import SwarmError

PROMPT_TOKENS = 16
HIGH_EVERY = 20
"""One request in ``HIGH_EVERY`` is of high priority."""
START_S = 0.5
"""Between an order and its beginning, which is at the same time in all processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request. Times are of the machine's monotonic clock, in seconds."""

    high: bool
    kind: str
    """``served``, ``rejected`` or ``failed``."""
    due_s: float
    asked_s: float
    ended_s: float
    came_s: tuple[float, ...] = ()
    """When each token came."""
    retry_after_s: float = 0.0
    reason: str = ""

    @property
    def took_s(self) -> float:
        return self.ended_s - self.asked_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a process is to do from ``start_s`` on: a closed loop, or arrivals at a rate."""

    start_s: float
    seconds: float
    streams: int = 0
    per_s: float = 0.0
    first: float = 0.0
    """When the first arrival is due, in steps of the rate: processes take turns."""
    plain: bool = False
    """Without drafts, and without looking for prefixes or keeping any."""


class Asker:
    """One connection and the requests over it."""

    def __init__(self, client: Swarm, tokens: int, seed: int) -> None:
        self._client = client
        self._tokens = tokens
        self._rng = random.Random(seed)

    async def ask(self, due_s: float, *, high: bool = False, plain: bool = False) -> Outcome:
        """One answer, or how it was refused."""
        prompt = [self._rng.randrange(300, 2000) for _ in range(PROMPT_TOKENS)]
        asked_s, came_s = time.monotonic(), []
        kind, reason, retry_after_s = "served", "", 0.0
        try:
            pieces = self._client.begin(
                prompt,
                max_new_tokens=self._tokens,
                ignore_eos=True,
                priority="high" if high else "normal",
                speculate=not plain,
                prefix_cache=PrefixCache.OFF if plain else PrefixCache.OWN,
            )
            async for piece in pieces:
                came_s += [time.monotonic()] * len(piece.token_ids)
        except UnavailableError as error:
            kind, reason, retry_after_s = "rejected", str(error), error.retry_after_s
        except SwarmError as error:
            kind, reason = "failed", str(error)
        return Outcome(
            high=high,
            kind=kind,
            due_s=due_s,
            asked_s=asked_s,
            ended_s=time.monotonic(),
            came_s=tuple(came_s),
            retry_after_s=retry_after_s,
            reason=reason,
        )

    async def loop(self, order: Order) -> list[Outcome]:
        """Answers one after another until the time is over."""
        done = []
        while time.monotonic() < order.start_s + order.seconds:
            done.append(await self.ask(time.monotonic(), plain=order.plain))
            if done[-1].kind != "served":
                await asyncio.sleep(max(0.1, done[-1].retry_after_s))
        return done

    async def arrivals(self, order: Order) -> list[Outcome]:
        """Requests at a rate, whatever becomes of them."""
        tasks = []
        for number in range(int(order.per_s * order.seconds)):
            due_s = order.start_s + (number + order.first) / order.per_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            high = number % HIGH_EVERY == 0
            tasks.append(asyncio.create_task(self.ask(due_s, high=high)))
        return list(await asyncio.gather(*tasks))

    async def carry_out(self, order: Order) -> list[Outcome]:
        """All requests of one order."""
        await asyncio.sleep(max(0.0, order.start_s - time.monotonic()))
        if order.per_s:
            return await self.arrivals(order)
        loops = await asyncio.gather(*(self.loop(order) for _ in range(order.streams)))
        return [outcome for one in loops for outcome in one]


async def _serve(
    pipe: Connection, addresses: list[str], model: str, tokens: int, seed: int
) -> None:
    config = SwarmConfig(wait_s=0.0)
    async with Swarm.connect(addresses, model=model, config=config) as client:
        asker = Asker(client, tokens, seed)
        pipe.send("ready")
        while (order := await asyncio.to_thread(pipe.recv)) is not None:
            pipe.send(await asker.carry_out(order))
        pipe.send(dict(client.view.counters))


def _process(pipe: Connection, *arguments: Any) -> None:
    asyncio.run(_serve(pipe, *arguments))


class Crowd:
    """Several asking processes; use as a context manager."""

    def __init__(
        self, addresses: list[str], model: str, *, processes: int, tokens: int, seed: int
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(processes):
            here, there = spawn.Pipe()
            process = spawn.Process(
                target=_process, args=(there, addresses, model, tokens, seed + number), daemon=False
            )
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    @property
    def process_ids(self) -> list[int]:
        """Process ids of those who ask."""
        return [process.pid for process in self._processes if process.pid is not None]

    def _all(self, orders: list[Order]) -> list[Outcome]:
        for pipe, order in zip(self._pipes, orders, strict=True):
            pipe.send(order)
        return [outcome for pipe in self._pipes for outcome in pipe.recv()]

    def streams(
        self, streams: int, seconds: float, *, plain: bool = False
    ) -> tuple[float, list[Outcome]]:
        """``streams`` answers at once, each followed by the next; when they began."""
        start_s, count = time.monotonic() + START_S, len(self._pipes)
        share = [streams // count + (at < streams % count) for at in range(count)]
        return start_s, self._all(
            [Order(start_s=start_s, seconds=seconds, streams=each, plain=plain) for each in share]
        )

    def arrivals(self, per_s: float, seconds: float) -> tuple[float, list[Outcome]]:
        """Requests at ``per_s`` in all, evenly."""
        start_s, count = time.monotonic() + START_S, len(self._pipes)
        return start_s, self._all(
            [
                Order(start_s=start_s, seconds=seconds, per_s=per_s / count, first=at / count)
                for at in range(count)
            ]
        )

    def stop(self) -> list[dict[str, int]]:
        """End all processes; returns their clients' counters."""
        for pipe in self._pipes:
            pipe.send(None)
        counters = [pipe.recv() for pipe in self._pipes]
        for process in self._processes:
            process.join(30)
        return counters

    def __enter__(self) -> "Crowd":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.is_alive():
                process.terminate()
            process.join(10)
