"""Typed access to the DHT's records of one model in one network, and of the network's models.

Keys are ``<network>/<model key>/<kind>``; each is a dictionary by author's peer id. The directory
of models is no model's: its key has ``EVERY_MODEL`` in that place. Records are published with their
kind's lifetime; :mod:`dht.records.signed` refuses more than twice that.
"""

from contextlib import suppress
from enum import StrEnum
from typing import Any

from dht.errors import NetworkError
from dht.messages import codec
from dht.messages.types import LeaseRecord, LinksRecord, ModelRecord, NodeRecord, PlanHead
from dht.records.sightings import Sightings
from dht.transport.interface import Transport

DEFAULT_NETWORK = "anabranch"
EVERY_MODEL = "*"
"""Stands for the model in the key of a network's directory of models."""


class RecordKind(StrEnum):
    NODES = "nodes"
    LINKS = "links"
    LEASE = "lease"
    PLAN = "plan"
    MODELS = "models"


LIFETIME_S: dict[RecordKind, float] = {
    RecordKind.NODES: 60.0,
    RecordKind.LINKS: 300.0,
    RecordKind.LEASE: 30.0,
    RecordKind.PLAN: 600.0,
    RecordKind.MODELS: 300.0,
}

RECORD_TYPES: dict[RecordKind, type] = {
    RecordKind.NODES: NodeRecord,
    RecordKind.LINKS: LinksRecord,
    RecordKind.LEASE: LeaseRecord,
    RecordKind.PLAN: PlanHead,
    RecordKind.MODELS: ModelRecord,
}


def record_key(network: str, model_key: str, kind: RecordKind) -> str:
    return f"{network}/{model_key}/{kind}"


class Directory:
    """The records of one model's peers, typed and validated.

    Records that do not decode, that name another author than the signer, or whose type does not
    match their key are skipped and counted in ``rejected``.
    """

    def __init__(self, transport: Transport, network: str, model_key: str) -> None:
        self._transport = transport
        self.network = network
        self.model_key = model_key
        self._decoded: dict[RecordKind, dict[str, tuple[bytes, Any]]] = {}
        """A cache of the last payloads and records, by kind and author: most do not change."""
        self.rejected = 0
        self.sightings = Sightings()
        """Node records that :meth:`nodes_as_seen` read, and when it did."""

    @classmethod
    def of_models(cls, transport: Transport, network: str) -> "Directory":
        """The network's directory of models: :meth:`models` reads it."""
        return cls(transport, network, EVERY_MODEL)

    async def publish(
        self, record: NodeRecord | LinksRecord | LeaseRecord | PlanHead | ModelRecord
    ) -> bool:
        """Store this peer's record for its kind's lifetime; False when no peer took it.

        Raises ValueError for a record that no peer would accept.
        """
        kind = next(kind for kind, cls in RECORD_TYPES.items() if type(record) is cls)
        return await self._transport.store(
            record_key(self.network, self.model_key, kind),
            codec.encode(codec.canonical(record)),
            expires_unix_s=self._transport.now() + LIFETIME_S[kind],
        )

    async def nodes(self, *, latest: bool = False) -> dict[str, NodeRecord]:
        """All living node records by peer id; with ``latest``, other peers are asked first."""
        return await self._read(RecordKind.NODES, latest=latest)

    def nodes_last_read(self) -> dict[str, NodeRecord]:
        """The node records of the newest read, by peer id; nobody is asked."""
        return self._sound(RecordKind.NODES)

    async def addresses_of(self, peer_id: str) -> tuple[str, ...]:
        """The addresses in a peer's own record; empty where nobody who can be asked has one.

        They are as last read where that read found the peer's record, so that a link to a known
        peer does not wait for others' answers.
        """
        _, record = self._decoded.get(RecordKind.NODES, {}).get(peer_id, (b"", None))
        for latest in (False, True):
            if record is None:
                with suppress(NetworkError):
                    record = (await self.nodes(latest=latest)).get(peer_id)
        return () if record is None else record.addresses

    async def nodes_as_seen(self) -> dict[str, NodeRecord]:
        """All living node records, with times that this process saw itself: see
        :meth:`dht.records.sightings.Sightings.look`. For decisions that seniority counts in."""
        return self.sightings.look(await self.nodes(), self._transport.now())

    async def links(self) -> dict[str, LinksRecord]:
        """All living links records, by the peer that measured the links."""
        return await self._read(RecordKind.LINKS)

    async def leases(self, *, latest: bool = False) -> dict[str, LeaseRecord]:
        """All living leases, by candidate; with ``latest``, other peers are asked first."""
        return await self._read(RecordKind.LEASE, latest=latest)

    async def plan_heads(self) -> dict[str, PlanHead]:
        """All living plan heads, by the peer that published them."""
        return await self._read(RecordKind.PLAN)

    async def models(self) -> dict[str, ModelRecord]:
        """The network's living model records, by the peer that holds a part of the model; other
        peers are asked first."""
        return await self._read(RecordKind.MODELS, latest=True)

    async def _read(self, kind: RecordKind, *, latest: bool = False) -> dict[str, Any]:
        key = record_key(self.network, self.model_key, kind)
        values = await self._transport.get(key, latest=latest)
        before = self._decoded.get(kind, {})
        decoded = {
            author: before[author]
            if author in before and before[author][0] == payload
            else (payload, self._decode(kind, author, payload))
            for author, payload in values.items()
        }
        self._decoded[kind] = decoded
        return self._sound(kind)

    def _sound(self, kind: RecordKind) -> dict[str, Any]:
        decoded = self._decoded.get(kind, {})
        return {author: record for author, (_, record) in decoded.items() if record is not None}

    def _decode(self, kind: RecordKind, author: str, payload: bytes) -> Any:
        """The decoded record; None, counted in ``rejected``, if it breaks a rule."""
        try:
            record: Any = codec.decode_as(
                RECORD_TYPES[kind], payload, limit_bytes=codec.FRAME_BOUNDS.record_bytes_max
            )
        except codec.MalformedError:
            self.rejected += 1
            return None
        if record.peer_id != author:
            self.rejected += 1
            return None
        return record
