"""Has other peers show that they hold layers, before this peer gives up its own for theirs.

A record says what a peer serves; anybody can write one. A peer that is to give up layers draws a
few of them, has another holder run rows through them, and compares the rows with what its own
layers make of them. The rows depend on a fresh nonce and on the peer that is asked, so an answer
for one peer is of no use to another, nor a second time. Who is about to give up its layers shows
them to nobody: of two that count on each other, whatever plans they follow, one at most goes.

What it does not show: that the other keeps the layers afterwards, or that it ran them itself (it
may feed the rows to an honest peer, in a session of its own).
"""

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch

from dht.budget import LAYER_CHECKS, Budget
from dht.errors import NetworkError, PeerError
from dht.messages import codec
from dht.messages.peer import NONCE_BYTES, LayerCheck, LayerRows
from dht.messages.types import NodeRecord
from dht.process.newest import Newest
from dht.transport.interface import LAYERS_PROTOCOL, Stream, Transport
from dht.transport.requests import answer, ask, next_request
from node.links.wire_rows import RowsError, join_rows, split_rows
from node.stage.local_engine import LocalEngine

logger = logging.getLogger(__name__)

ROWS = 4
LAYERS_CHECKED_MAX = 4
"""Maximum layers of one check: differences of precision grow with every layer."""
APART_MAX = 0.5
"""Maximum distance of two peers' rows, relative to what the layers add to them. Brook's layers in
int4 are 0.2 apart from those in float32 on average and 0.33 at most; rows that no layer ran are 1
apart, or more."""
SCALE = 0.1
"""Standard deviation of the rows that go in: as small as embeddings, so that layers add much."""
DTYPE = "float32"


def rows_for(nonce: bytes, peer_id: str, hidden: int) -> torch.Tensor:
    """The rows ``[ROWS, hidden]`` that go in, in float32, for the peer that is asked."""
    key = sha256(nonce + peer_id.encode()).digest()
    drawn = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
    rows = drawn.standard_normal((ROWS, hidden), dtype=np.float32)
    return torch.from_numpy(SCALE * rows)


def agree(given: torch.Tensor, mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether both peers ran the same layers over ``given``, each in its own precision.

    ``given`` may be wider: it is cut to the hidden states that come out.
    """
    return apart(given, mine, theirs) <= APART_MAX


def apart(given: torch.Tensor, mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Distance of two peers' rows, relative to what this peer's layers add to ``given``."""
    added = torch.linalg.vector_norm(mine - given[:, : mine.shape[1]])
    return float(torch.linalg.vector_norm(theirs - mine) / added)


class LayerCheckServer:
    """Runs the rows that other peers ask for, within their budget."""

    def __init__(
        self,
        transport: Transport,
        engine: LocalEngine,
        budget: Budget | None = None,
        leaves: Callable[[], bool] = lambda: False,
    ) -> None:
        """``leaves`` tells whether this peer is about to give up its layers."""
        self._transport = transport
        self._engine = engine
        self._budget = budget or Budget()
        self._leaves = leaves

    async def start(self) -> None:
        await self._transport.serve(LAYERS_PROTOCOL, self._serve)

    async def _serve(self, stream: Stream) -> None:
        request = await next_request(stream, self._budget)
        if not isinstance(request, LayerCheck):
            raise codec.MalformedError(f"{type(request).__name__} asks for no rows")
        if not 0 < request.end - request.start <= LAYERS_CHECKED_MAX:
            raise codec.MalformedError(f"layers [{request.start}, {request.end}) to check")
        made, now_s = None, asyncio.get_running_loop().time()
        may = self._budget.rate(LAYER_CHECKS).take(stream.remote_peer_id, 1, now_s)
        if may and not self._leaves():
            rows = rows_for(request.nonce, self._transport.peer_id, self._engine.hidden)
            made = await self._engine.run_rows(request.start, request.end, rows)
        if self._leaves():  # since the rows were asked for
            made = None
        await answer(stream, LayerRows(), b"" if made is None else join_rows([made.float()]))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckConfig:
    """Whom a peer asks to show its layers, and how often."""

    answer_s: float = 10.0
    proven_s: float = 60.0
    """Time for which a peer that showed its layers is not asked again."""
    retry_s: float = 30.0
    """Time after which a peer that did not show its layers is asked again."""
    asked_at_once: int = 4
    remembered_max: int = 1024


CHECKING = CheckConfig()


class LayerChecker:
    """Knows which peers have shown that they hold layers that this peer holds, too."""

    def __init__(self, transport: Transport, engine: LocalEngine) -> None:
        self._transport = transport
        self._engine = engine
        self._rng = random.Random(transport.peer_id)  # noqa: S311  who is asked first is no secret
        self._seen: Newest[tuple[str, int, int], tuple[bool, float]]
        self._seen = Newest(CHECKING.remembered_max)
        """Whether each peer showed the layers of a record, and when."""

    async def proven(
        self,
        holders: Iterable[NodeRecord],
        mine: range,
        needed: Collection[int],
        *,
        again: bool = False,
    ) -> frozenset[str]:
        """The peers of ``holders`` that have shown their part of ``mine``, the layers held here.

        As few are asked as leave no layer of ``needed`` without such a peer, ``asked_at_once`` at
        most. With ``again``, peers must show now what they showed before; the others are not asked.
        """
        found, left = set(), set(needed)
        now_s = asyncio.get_running_loop().time()
        asked: list[NodeRecord] = []
        unknown: list[NodeRecord] = []
        for record in holders:
            shown, at_s = self._seen.get(_name(record), (False, -CHECKING.retry_s))
            if again:
                if shown:
                    unknown.append(record)
            elif shown and now_s - at_s < CHECKING.proven_s:
                found.add(record.peer_id)
                left -= set(range(record.start, record.end))
            elif shown or now_s - at_s >= CHECKING.retry_s:
                unknown.append(record)
        self._rng.shuffle(unknown)
        for record in unknown:
            layers = set(range(record.start, record.end))
            if left & layers and (again or len(asked) < CHECKING.asked_at_once):
                asked.append(record)
                left -= layers if again else set()
        shows = await asyncio.gather(*(self._shows(record, mine) for record in asked))
        for record, shown in zip(asked, shows, strict=True):
            self._seen[_name(record)] = shown, asyncio.get_running_loop().time()
            if shown:
                found.add(record.peer_id)
        return frozenset(found)

    def unshown(self, records: Iterable[NodeRecord]) -> frozenset[str]:
        """The peers of ``records`` that did not show their layers when they were last asked."""
        return frozenset(r.peer_id for r in records if not self._seen.get(_name(r), (True, 0.0))[0])

    async def _shows(self, record: NodeRecord, mine: range) -> bool:
        """Whether a peer makes the same of fresh rows as some layers that both hold."""
        both = range(max(record.start, mine.start), min(record.end, mine.stop))
        count = min(len(both), LAYERS_CHECKED_MAX)
        start = both.start + secrets.randbelow(len(both) - count + 1)
        nonce = secrets.token_bytes(NONCE_BYTES)
        given = rows_for(nonce, record.peer_id, self._engine.hidden)
        made = await self._engine.run_rows(start, start + count, given)
        if made is None:
            return False
        check = LayerCheck(nonce=nonce, start=start, end=start + count)
        try:
            async with asyncio.timeout(CHECKING.answer_s):
                theirs = await self._ask(record, check, made.shape[1])
        except (NetworkError, PeerError, RowsError, TimeoutError) as error:
            logger.info("peer %s does not show its layers: %s", record.peer_id, error)
            return False
        if not agree(given, made.float(), theirs):
            logger.warning("peer %s holds other layers than it says", record.peer_id)
            return False
        return True

    async def _ask(self, record: NodeRecord, check: LayerCheck, width: int) -> torch.Tensor:
        frame = await ask(
            self._transport,
            record.peer_id,
            LAYERS_PROTOCOL,
            check,
            addresses=record.addresses,
            limit_bytes=4 * ROWS * width + 1024,
        )
        if not isinstance(frame.message, LayerRows):
            raise codec.MalformedError(f"{type(frame.message).__name__} shows no layers")
        (rows,) = split_rows(frame.body, DTYPE, width, [ROWS], DTYPE)
        return rows


def _name(record: NodeRecord) -> tuple[str, int, int]:
    return record.peer_id, record.start, record.end
