"""Keeps the plans that serving peers say they follow, for one that draws routes and follows none.

A client cannot judge whether a plan is good, and whoever can make names can make plans. What the
serving peers do is what counts: each says in its signed record which plan it follows, after its own
review. A plan that none of them follows is not even fetched, and is forgotten when they leave it.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from coordinator.plans.store import STORING, ask_body, decode_plan
from coordinator.plans.versions import rank
from coordinator.policies.routing.routes import announced_tokens_per_s
from dht.errors import NetworkError, PeerError
from dht.messages.types import NO_VERSION, NodeRecord, NodeState, Plan, PlanHead, PlanVersion
from dht.records.directory import Directory
from dht.transport.interface import Transport

logger = logging.getLogger(__name__)

PLANS_MAX = 8
"""Maximum plans that are kept (:func:`followers_of`)."""


class FollowedPlans:
    """The plans that serving peers follow, by version."""

    def __init__(self, transport: Transport, directory: Directory) -> None:
        self._transport = transport
        self._directory = directory
        self.plans: dict[PlanVersion, Plan] = {}
        self.counters: Counter[str] = Counter()
        self._tries: dict[str, tuple[int, float]] = {}
        """By a missing body's hash: how often it was asked for, and when it may be again."""

    async def refresh(
        self, nodes: Mapping[str, NodeRecord], trusts: Callable[[str], bool] = lambda _: False
    ) -> None:
        """Fetch what the serving peers of ``nodes`` follow, first what peers follow that the caller
        ``trusts``; takes ``STORING.fetch_s`` at most.

        Raises NetworkError when the DHT cannot be read.
        """
        followers = followers_of(nodes, trusts)
        self.plans = {v: plan for v, plan in self.plans.items() if v in followers}
        if followers.keys() <= self.plans.keys():
            return
        heads = [
            head
            for head in (await self._directory.plan_heads()).values()
            if head.version in followers
            and head.version not in self.plans
            # Else another author could pass its plan off as one that honest peers follow.
            and head.version.rank == rank(head.peer_id, head.version.term)
        ]
        now_s = asyncio.get_running_loop().time()
        self._tries = {
            head.sha256: self._tries[head.sha256] for head in heads if head.sha256 in self._tries
        }
        due = [head for head in heads if now_s >= self._tries.get(head.sha256, (0, now_s))[1]]
        found = await asyncio.gather(*(self._fetch(head, followers[head.version]) for head in due))
        self.plans.update((plan.version, plan) for plan in found if plan is not None)

    async def _fetch(self, head: PlanHead, followers: list[str]) -> Plan | None:
        """Ask the author, or one of the followers the next time."""
        holders = [head.peer_id, *followers[: STORING.holders_max]]
        tried, _ = self._tries.get(head.sha256, (0, 0.0))
        rounds = (tried + 1) // len(holders)
        longer_s = min(STORING.retry_max_s, STORING.retry_s * 2 ** min(rounds, 8))
        pause_s = longer_s if rounds else 0.0
        self._tries[head.sha256] = (tried + 1, asyncio.get_running_loop().time() + pause_s)
        holder = holders[tried % len(holders)]
        try:
            async with asyncio.timeout(STORING.fetch_s):
                body = await ask_body(self._transport, self._directory, holder, head)
                return await asyncio.to_thread(decode_plan, head, body, self._directory.model_key)
        except (NetworkError, PeerError, TimeoutError) as error:
            self.counters["fetch_failed"] += 1
            logger.info("no plan %s from %s: %s", head.version, holder, error)
            return None


def followers_of(
    nodes: Mapping[str, NodeRecord], trusts: Callable[[str], bool]
) -> dict[PlanVersion, list[str]]:
    """The serving peers of ``PLANS_MAX`` versions: first of those that a trusted peer follows, then
    of those whose followers announce the highest rates at layer 0."""
    found: defaultdict[PlanVersion, list[str]] = defaultdict(list)
    could: defaultdict[PlanVersion, float] = defaultdict(float)
    for peer_id, record in sorted(nodes.items()):
        if record.state is NodeState.SERVING and record.plan_version != NO_VERSION:
            found[record.plan_version].append(peer_id)
            if record.start == 0:
                could[record.plan_version] += announced_tokens_per_s(record)
    trusted = {version for version, peers in found.items() if any(map(trusts, peers))}
    first = sorted(found, key=lambda v: (v in trusted, could[v], v), reverse=True)
    return {version: found[version] for version in first[:PLANS_MAX]}
