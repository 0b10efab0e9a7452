"""Reviews plans by the records that this peer sees, and by pings where a record may be stale."""

import asyncio
import random
from collections.abc import Iterable

from coordinator.plans.review import REVIEW, Opinion, Verdict, review
from coordinator.policies.failure.pinger import BY_PEERS, answers_ping
from dht.messages.types import NodeRecord, NodeState, Plan
from dht.records.directory import Directory
from dht.transport.interface import Transport

PINGED_MAX = 16
"""Maximum peers that one review pings: peers that a plan leaves out may be dead."""


class Reviewer:
    """The review that a :class:`coordinator.plans.store.PlanStore` asks before it adopts a plan."""

    def __init__(self, transport: Transport, directory: Directory) -> None:
        self._transport = transport
        self._directory = directory
        self._rng = random.Random(transport.peer_id)  # noqa: S311  (whom to ping first)

    async def __call__(self, plan: Plan, running: Plan | None) -> Verdict:
        """This peer's verdict on ``plan``. Raises NetworkError when no records can be read."""
        nodes, links = await asyncio.gather(
            self._directory.nodes_as_seen(), self._directory.links()
        )
        if self._transport.peer_id in plan.silent:
            return await self._left_out_as_silent(plan, nodes)
        known_unix_s = self._transport.now() - REVIEW.known_for_s
        changed = self._directory.sightings.changed_since(known_unix_s)
        gone: frozenset[str] = frozenset()
        while True:
            verdict = await asyncio.to_thread(
                review,
                plan,
                nodes,
                links,
                running=running,
                gone=gone,
                changed=changed,
                now_unix_s=self._transport.now(),
            )
            if verdict.opinion not in {Opinion.WORSE, Opinion.UNSURE} or gone:
                return verdict
            gone = await self._gone(_left_out(plan, nodes, self._transport.peer_id))
            if not gone:
                return verdict

    async def _left_out_as_silent(self, plan: Plan, nodes: dict[str, NodeRecord]) -> Verdict:
        """The verdict on a plan whose author says that this peer does not answer it.

        An honest author reaches whom it is reached by, and makes another plan. Where the two cannot
        reach each other the plan is for the others, and nobody is to blame.
        """
        author = nodes.get(plan.coordinator)
        reached = author is None or await self._answers(author)
        return Verdict(
            opinion=Opinion.UNSURE,
            reason="it says that this peer does not answer the coordinator",
            blames=reached,
        )

    async def _gone(self, peers: list[NodeRecord]) -> frozenset[str]:
        """Those of ``peers`` that do not answer a ping; a random sample where there are many."""
        sample = self._rng.sample(peers, min(PINGED_MAX, len(peers)))
        answers = await asyncio.gather(*(self._answers(record) for record in sample))
        return frozenset(
            record.peer_id for record, there in zip(sample, answers, strict=True) if not there
        )

    async def _answers(self, record: NodeRecord) -> bool:
        return await answers_ping(self._transport, BY_PEERS, record.peer_id, record.addresses)


def _left_out(plan: Plan, nodes: dict[str, NodeRecord], me: str) -> list[NodeRecord]:
    given: Iterable[str] = {a.peer_id for a in plan.assignments}
    return [
        record
        for peer_id, record in sorted(nodes.items())
        if peer_id not in given
        and peer_id not in plan.silent
        and peer_id != me
        and record.state is not NodeState.DRAINING
    ]
