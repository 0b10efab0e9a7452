"""Stores plan bodies by hash: fetches them from peers, checks, keeps and serves them."""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from coordinator.evaluation.plan_check import check_shape
from coordinator.plans.review import FINE, Opinion, Verdict
from coordinator.plans.trust import Trust
from coordinator.plans.versions import plausible
from dht.budget import PLAN_BYTES, Budget
from dht.errors import NetworkError, PeerError
from dht.messages import codec
from dht.messages.peer import PEER_BOUNDS, PlanBody, PlanRequest, Witness, WitnessRequest
from dht.messages.session import Ping, Pong
from dht.messages.types import NO_VERSION, RECORD_BOUNDS, ModelSpec, Plan, PlanHead, PlanVersion
from dht.process.newest import Newest
from dht.records.directory import Directory
from dht.transport.interface import PLAN_PROTOCOL, Stream, Transport
from dht.transport.requests import answer, ask, next_request

logger = logging.getLogger(__name__)

WANTING_S: dict[Opinion, float] = {
    Opinion.IMPOSSIBLE: 5.0,
    Opinion.WORSE: 5.0,
    Opinion.UNSURE: 30.0,
}
"""Minimum time, by opinion, for which an author's plans must be found wanting, in ``looks_max``
reviews or more, before one is refused for good: records may lag."""


HeadName = tuple[str, str]
"""Author and hash of a plan: anybody can publish a head with the hash of another's plan."""
Review = Callable[[Plan, Plan | None], Awaitable[Verdict]]
"""Judges a plan, given the running one."""


async def ask_body(
    transport: Transport, directory: Directory, holder: str, head: PlanHead
) -> bytes:
    """The body of the plan of ``head``, from the peer ``holder``, where its record says that it is.

    Raises NetworkError where that one does not answer or does not have it, PeerError where it sends
    something else.
    """
    addresses = await directory.addresses_of(holder)
    request, limit_bytes = PlanRequest(sha256=head.sha256), head.size_bytes + 1024
    frame = await ask(
        transport, holder, PLAN_PROTOCOL, request, addresses=addresses, limit_bytes=limit_bytes
    )
    if not isinstance(frame.message, PlanBody) or len(frame.body) != head.size_bytes:
        raise NetworkError("it does not have that plan")
    if hashlib.sha256(frame.body).hexdigest() != head.sha256:
        raise codec.MalformedError("the body has another hash than its head says")
    return bytes(frame.body)


def decode_plan(head: PlanHead, body: bytes, model_key: str) -> Plan:
    """The plan in ``body``. Raises PeerError unless it is well formed and the one of ``head``, for
    the model of that key."""
    plan: Plan = codec.decode_as(Plan, body, limit_bytes=RECORD_BOUNDS.plan_bytes_max)
    wrong = check_shape(plan)
    said = (head.version, head.peer_id, head.fetch_bytes)
    if (plan.version, plan.coordinator, plan.fetch_bytes) != said:
        wrong.append("its head speaks of another plan")
    if plan.model.key != model_key:
        wrong.append("it is for another model")
    if wrong:
        raise codec.MalformedError(wrong[0])
    return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """How plans are looked for, fetched and kept."""

    bodies_max: int = 8
    fetch_s: float = 5.0
    holders_max: int = 4
    """Maximum adopters that one refresh asks for a body."""
    retry_s: float = 2.0
    retry_max_s: float = 30.0
    """Maximum pause before a body that nobody had is asked for again; it doubles from
    ``retry_s``."""
    heads_max: int = 8
    """Maximum heads that one refresh follows: anybody can publish a head without a body."""
    looks_max: int = 3
    refused_max: int = 256
    """Maximum heads that are remembered as refused."""


STORING = StoreConfig()


class PlanStore:
    """The newest plan this peer has seen and checked. Any peer may ask it for bodies.

    ``review`` judges plans of a right shape before they are adopted; without it they are adopted
    without a review. ``model`` is the model that plans must be for, where it is known here.
    ``coordinators`` are the only peers whose plans count; empty: everybody's may. Of these, once
    there is an election here, those count that hold the lease or made the running plan.
    """

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        *,
        review: Review | None = None,
        model: ModelSpec | None = None,
        coordinators: frozenset[str] = frozenset(),
        budget: Budget | None = None,
    ) -> None:
        self._transport = transport
        self._budget = budget or Budget()
        self._directory = directory
        self._review = review
        self._model = model
        self._coordinators = coordinators
        self._wanting: Newest[str, tuple[int, float]] = Newest(STORING.refused_max)
        self.trust = Trust()
        self.leader: str | None = None
        """The elected peer, as the election here sees it; set beside ``elected``."""
        self.elected = False
        """Whether there is an election here, so that nobody but ``leader`` and the author of the
        running plan makes plans. Without one, as at an observer, everybody does."""
        self.witness: Callable[[str], bool | None] = lambda peer_id: None
        """Whether a peer answers this one, for other peers that ask; None: unknown."""
        self._bodies: Newest[str, bytes] = Newest(STORING.bodies_max)
        self._refused: Newest[HeadName, None] = Newest(STORING.refused_max)
        self._unelected: Newest[HeadName, None] = Newest(STORING.refused_max)
        """Heads whose authors did not coordinate when they were seen."""
        self._retry: dict[HeadName, tuple[float, float]] = {}
        self._changed = asyncio.Condition()
        self.newest: Plan | None = None
        self.head: PlanHead | None = None
        self.head_seen_s = 0.0
        """When a head of the newest plan was last seen, by the event loop's clock."""
        self.counters: Counter[str] = Counter()

    @property
    def version(self) -> PlanVersion:
        """The version of the newest plan; ``NO_VERSION`` before there is a plan."""
        return self.newest.version if self.newest is not None else NO_VERSION

    async def serve(self) -> None:
        """Answer other peers' requests for bodies, their pings and witness requests."""
        await self._transport.serve(PLAN_PROTOCOL, self._serve)

    async def _serve(self, stream: Stream) -> None:
        for _ in range(PEER_BOUNDS.requests_max):
            match await next_request(stream, self._budget):
                case Ping(nonce=nonce):
                    await answer(stream, Pong(nonce=nonce))
                case PlanRequest(sha256=sha256):
                    body, now_s = self._bodies.get(sha256, b""), asyncio.get_running_loop().time()
                    share = self._budget.rate(PLAN_BYTES)
                    if not share.take(stream.remote_peer_id, len(body), now_s):
                        body = b""
                    await answer(stream, PlanBody(sha256=sha256), body)
                case WitnessRequest(peer_id=peer_id):
                    answers = self.witness(peer_id)
                    await answer(stream, Witness(peer_id=peer_id, answers=answers))
                case _:
                    raise codec.MalformedError("this stream takes plan requests and pings")

    async def add(self, plan: Plan) -> PlanHead:
        """Keep this peer's own plan as the newest; returns the head to publish.

        Raises ValueError for a plan that no peer would accept.
        """
        plan = codec.canonical(plan)
        body = codec.encode(plan)
        head = PlanHead(
            peer_id=self._transport.peer_id,
            version=plan.version,
            sha256=hashlib.sha256(body).hexdigest(),
            size_bytes=len(body),
            fetch_bytes=plan.fetch_bytes,
        )
        await self._adopt(plan, head, body)
        return head

    async def refresh(self) -> None:
        """Look for a newer plan and fetch it. A refused plan is never asked for again.

        Raises NetworkError when the DHT cannot be read.
        """
        heads = await self._directory.plan_heads()
        loop = asyncio.get_running_loop()
        if any(head.version == self.version for head in heads.values()):
            self.head_seen_s = loop.time()
        distrusted = self.trust.distrusted(loop.time())
        newer = [
            head
            for head in heads.values()
            if head.version > self.version
            and plausible(head.version, self._transport.now())
            and head.peer_id not in distrusted
            and self._may_plan(head)
        ]
        self._retry = {
            name: self._retry[name] for name in map(_name_of, newer) if name in self._retry
        }
        due = [
            head
            for head in newer
            if _name_of(head) not in self._refused
            and loop.time() >= self._retry.get(_name_of(head), (0.0, STORING.retry_s))[0]
        ]
        for head in (await self._by_promise(due))[: STORING.heads_max]:
            if await self._fetch(head, [head.peer_id]):
                return
            if await self._fetch(head, await self._adopters(head)):
                return
            _, pause_s = self._retry.get(_name_of(head), (0.0, STORING.retry_s))
            self._retry[_name_of(head)] = (
                loop.time() + pause_s,
                min(STORING.retry_max_s, 2 * pause_s),
            )

    def _may_plan(self, head: PlanHead) -> bool:
        """Whether plans of this head's author count here: anybody can publish a head.

        One that does not count now may later, once its author is elected; it is counted once.
        """
        author = head.peer_id
        if self._coordinators and author not in self._coordinators:
            return False
        running = None if self.newest is None else self.newest.coordinator
        if not self.elected or author in {self.leader, running, self._transport.peer_id}:
            return True
        if _name_of(head) not in self._unelected:
            self.counters["refused"] += 1
            logger.info("plan %s of %s, who does not coordinate", head.version, author)
        self._unelected[_name_of(head)] = None
        return False

    async def _by_promise(self, heads: list[PlanHead]) -> list[PlanHead]:
        """The heads in order: the leader's, then those that most peers adopted, then the newest."""
        if len(heads) <= 1:
            return heads
        records = (await self._directory.nodes()).values()
        adopted = Counter(record.plan_version for record in records)
        return sorted(
            heads,
            key=lambda head: (head.peer_id == self.leader, adopted[head.version], head.version),
            reverse=True,
        )

    async def _adopters(self, head: PlanHead) -> list[str]:
        """Other peers that announce that they adopted this plan: its author may be gone."""
        nodes = await self._directory.nodes()
        having = [
            peer_id
            for peer_id, record in nodes.items()
            if record.plan_version == head.version
            and peer_id not in {head.peer_id, self._transport.peer_id}
        ]
        return sorted(having)[: STORING.holders_max]

    async def _fetch(self, head: PlanHead, holders: list[str]) -> bool:
        for holder in holders:
            try:
                async with asyncio.timeout(STORING.fetch_s):
                    body = await self._ask(holder, head)
            except (NetworkError, TimeoutError) as error:
                self.counters["fetch_failed"] += 1
                logger.info("no plan %s from %s: %s", head.version, holder, error)
                continue
            except PeerError as error:
                self.counters["malformed"] += 1
                logger.warning("plan %s from %s: %s", head.version, holder, error)
                continue
            return await self._take(head, body)
        return False

    async def _ask(self, holder: str, head: PlanHead) -> bytes:
        if holder == self._transport.peer_id:
            body = self._bodies.get(head.sha256)
            if body is None:
                raise NetworkError("published by this peer before it was restarted")
            return body
        return await ask_body(self._transport, self._directory, holder, head)

    async def _take(self, head: PlanHead, body: bytes) -> bool:
        try:
            # A body of 8 MiB takes a while.
            plan = await asyncio.to_thread(decode_plan, head, body, self._directory.model_key)
            if self._model is not None and not plan.model.serves_with(self._model):
                raise codec.MalformedError("it is for another model")
        except PeerError as error:
            self._refuse(head, str(error), strikes=self.trust.config.strikes)
            return False
        verdict = await self._review(plan, self.newest) if self._review is not None else FINE
        if verdict.opinion is Opinion.FINE:
            self._wanting.pop(head.peer_id, None)
            await self._adopt(plan, head, body)
            return True
        self.counters[verdict.opinion] += 1
        now_s = asyncio.get_running_loop().time()
        looks, since_s = self._wanting.pop(head.peer_id, (0, now_s))
        if looks + 1 >= STORING.looks_max and now_s - since_s >= WANTING_S[verdict.opinion]:
            self._refuse(head, verdict.reason, strikes=int(verdict.blames))
            return False
        self._wanting[head.peer_id] = (looks + 1, since_s)
        logger.info("not yet plan %s of %s: %s", head.version, head.peer_id, verdict.reason)
        return False

    def _refuse(self, head: PlanHead, reason: str, *, strikes: int) -> None:
        """Never ask for this plan again, and hold it against its author."""
        self.counters["refused"] += 1
        self._refused[_name_of(head)] = None
        if strikes and head.peer_id != self._transport.peer_id:
            now_s = asyncio.get_running_loop().time()
            self.trust.strike(head.peer_id, now_s, times=strikes)
        logger.warning("refused plan %s of %s: %s", head.version, head.peer_id, reason)

    async def _adopt(self, plan: Plan, head: PlanHead, body: bytes) -> None:
        async with self._changed:
            if plan.version <= self.version:
                return
            self._bodies[head.sha256] = body
            self.newest, self.head = plan, head
            self.head_seen_s = asyncio.get_running_loop().time()
            self._changed.notify_all()

    async def wait_newer(self, version: PlanVersion) -> Plan:
        async with self._changed:
            await self._changed.wait_for(lambda: self.version > version)
            if self.newest is None:
                raise RuntimeError("a version without a plan")
            return self.newest


def _name_of(head: PlanHead) -> HeadName:
    return head.peer_id, head.sha256
