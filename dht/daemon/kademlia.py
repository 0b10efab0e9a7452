"""Runs hivemind's Kademlia node under our rules for records. Imports hivemind: import it lazily.

Stock nodes refuse a whole dictionary for one bad entry, so a record that has just expired would
hide all others; here each entry is judged alone. Stock nodes also trust the expiry that a replica
states for a whole dictionary, by which one peer can end a search early. Nor does anything that
another peer sent reach hivemind's own reader of values (:mod:`dht.daemon.dictionary`).
"""

import asyncio
import logging
from collections import Counter
from contextvars import ContextVar
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.proto import dht_pb2
from hivemind.utils import MAX_DHT_TIME_DISCREPANCY_SECONDS, MSGPackSerializer, get_dht_time
from hivemind.utils.timed_storage import ValueWithExpiration

from dht.budget import (
    DHT_BULK_STORES,
    DHT_FIND_BYTES,
    DHT_FOUND_BYTES,
    DHT_PINGS,
    DHT_STORE_BYTES,
    DHT_STORES,
    Budget,
)
from dht.daemon.dictionary import DICTIONARY_BYTES_MAX, Entry, author_of, entries_of, record_in
from dht.errors import NetworkError, PeerError
from dht.messages.codec import MalformedError
from dht.messages.peer import SignedRecord
from dht.process.supervision import loop_s
from dht.records.signed import KEEPING, RecordError, RecordGuard

REPLICAS = 8
BUCKET_PEERS = 20
DEPTH_MODULO = 5
RPC_LIMIT_S = 3.0
OWN_STORES_MAX = 4
"""Maximum values in the request of a peer that stores its own records."""
FIND_KEYS_MAX = 16
"""Maximum keys in one find request; our nodes ask for four at most."""
FIND_BYTES_MAX = DICTIONARY_BYTES_MAX
"""Maximum bytes of values in one answer."""
PEER_ID_BYTES_MAX = 64
"""Maximum bytes of a peer id; those of the network's peers have 38. hivemind writes each that it
reads in base 58, which for a megabyte takes hours."""
ASKED_KEY_BYTES = 1024
"""Bytes charged for each key besides its values: the answer also names its neighbours."""
NODE_ID_PREFIX = b"anabranch-dht-node-v1\0"

_log = logging.getLogger(__name__)
_accepted: ContextVar[list[bool] | None] = ContextVar("accepted", default=None)
_bringer: ContextVar[str] = ContextVar("bringer", default="")
"""The peer that brings the records being validated; "": this peer itself."""


class RecordValidator(RecordValidatorBase):  # type: ignore[misc]
    """Accepts records signed by their authors only; ``rejected`` counts refusals by error type."""

    def __init__(self, guard: RecordGuard, rejected: Counter[str]) -> None:
        self.guard = guard
        self.rejected = rejected

    def validate(self, record: DHTRecord) -> bool:
        """Whether ``record`` may be stored or returned. Never raises."""
        try:
            self._admit(record)
        except (PeerError, ValueError, TypeError) as error:
            self.refuse(error)
            return False
        return True

    def refuse(self, error: Exception) -> None:
        self.rejected[type(error).__name__] += 1
        _log.debug("refused a DHT record: %s", error)

    def _admit(self, record: DHTRecord) -> None:
        # A plain value has the subkey None, a whole dictionary an empty one: neither is a string.
        author, data = author_of(record.subkey), record_in(record.value)

        def check(opened: SignedRecord) -> None:
            if DHTID.generate(source=opened.key).to_bytes() != record.key:
                raise RecordError(f"a record of {opened.key[:80]!r} lies under another key")
            if opened.expires_unix_s != record.expiration_time:
                raise RecordError("the expiry given differs from the signed one")

        self.guard.admit(
            data, author=author, now_unix_s=get_dht_time(), check=check, storer=_bringer.get()
        )

    def merge_with(self, other: RecordValidatorBase) -> bool:
        return False


def node_id_of(peer_id: Any) -> Any:
    """A peer's place in the DHT, which follows from its key: peers cannot choose neighbours."""
    return DHTID.generate(source=NODE_ID_PREFIX + peer_id.to_bytes())


class RecordSerializer(MSGPackSerializer):  # type: ignore[misc]
    """hivemind's, but that it reads nothing else than packed records."""

    loads = staticmethod(record_in)


class RecordProtocol(DHTProtocol):  # type: ignore[misc]
    """The node's RPCs, with per-entry validation, rate limits, and places that follow from keys."""

    serializer = RecordSerializer

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.use(Budget())
        self.misplaced = 0
        """Number of claims to another place in the DHT than the peer's key gives."""
        self._checked = 0

    def use(self, budget: Budget) -> None:
        """Count what other peers take from here on in ``budget``."""
        self._pings = budget.rate(DHT_PINGS)
        self._stores = budget.rate(DHT_STORES)
        self._store_bytes = budget.rate(DHT_STORE_BYTES)
        self._bulk = budget.rate(DHT_BULK_STORES)
        self._finds = budget.rate(DHT_FIND_BYTES)
        self._found = budget.rate(DHT_FOUND_BYTES)

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        # The stock name: peers of one network may run different subclasses.
        name = f"{DHTProtocol.__name__}.{method_name}"
        return name if namespace is None else f"{namespace}::{name}"

    async def rpc_ping(
        self, request: dht_pb2.PingRequest, context: P2PContext
    ) -> dht_pb2.PingResponse:
        """Meet another node, and call it back if it asks for that, within its rate."""
        if len(request.peer.node_id) not in {0, DHTID.HASH_NBYTES}:
            raise MalformedError("a place in the DHT has 20 bytes")
        if request.validate and not self._pings.take(context.remote_id.to_base58(), 1, loop_s()):
            request = dht_pb2.PingRequest(peer=request.peer)
        return await super().rpc_ping(request, context)

    async def rpc_store(
        self, request: dht_pb2.StoreRequest, context: P2PContext
    ) -> dht_pb2.StoreResponse:
        """Store records for another peer, as many and as large as its rates allow.

        Raises MalformedError for a request that no peer of ours makes.
        """
        peer, count = context.remote_id.to_base58(), len(request.keys)
        rest = (request.subkeys, request.values, request.expiration_time, request.in_cache)
        if count > self._stores.limit.burst or any(len(each) != count for each in rest):
            raise MalformedError(f"{count} keys, too many or with fewer values")
        answer = dht_pb2.StoreResponse(store_ok=[False] * count, peer=self.node_info)
        # Our nodes cache nothing at others: a request for it asks for memory without accounting.
        if any(request.in_cache) or not self._store_bytes.take(peer, request.ByteSize(), loop_s()):
            return answer
        await self.rpc_ping(dht_pb2.PingRequest(peer=request.peer), context)
        bulk = count > OWN_STORES_MAX or self.IS_DICTIONARY in request.subkeys
        token = _bringer.set(peer)
        try:
            for at, (key, *sent) in enumerate(zip(request.keys, *rest[:3], strict=True)):
                for entry in self._sent_entries(*sent):
                    if not self._within_rates(peer, bulk=bulk):
                        return answer
                    if self._is_valid(key, *entry):
                        stored = self.storage.store_subkey(DHTID.from_bytes(key), *entry)
                        answer.store_ok[at] |= stored
                    await self._next_turn()
        finally:
            _bringer.reset(token)
        return answer

    def _sent_entries(self, subkey: bytes, value: bytes, expires_s: float) -> list[Entry]:
        """The entries in one value of a request; none where it is malformed."""
        try:
            if subkey == self.IS_DICTIONARY:
                return entries_of(value)
            return [(author_of(subkey), value, expires_s)]
        except MalformedError as error:
            self.record_validator.refuse(error)
            return []

    def _within_rates(self, peer: str, *, bulk: bool) -> bool:
        now_s = loop_s()
        return self._stores.take(peer, 1, now_s) and (not bulk or self._bulk.take("", 1, now_s))

    async def _next_turn(self) -> None:
        """Let others have the loop between entries."""
        self._checked += 1
        if self._checked % KEEPING.records_a_turn == 0:
            await asyncio.sleep(0)

    def _is_valid(self, key: bytes, author: str, value: bytes, expires_s: float) -> bool:
        packed: bytes = self.serializer.dumps(author)
        valid: bool = self._validate_record(key, packed, value, expires_s)
        return valid

    async def rpc_find(
        self, request: dht_pb2.FindRequest, context: P2PContext
    ) -> dht_pb2.FindResponse:
        """Values and neighbours for a few different keys, within the peer's rate in bytes.

        Values that would make the answer too long are left out, as if they were not stored here.
        """
        keys = list(request.keys[: FIND_KEYS_MAX + 1])
        answer = dht_pb2.FindResponse(results=[], peer=self.node_info)
        asker = request.peer.node_id
        if (
            len(keys) > FIND_KEYS_MAX
            or len(set(keys)) < len(keys)
            or any(len(each) != DHTID.HASH_NBYTES for each in (*keys, *([asker] if asker else [])))
        ):
            return answer
        left = FIND_BYTES_MAX
        for key in keys:
            size = self._stored_bytes(key)
            cost = size + ASKED_KEY_BYTES
            if not self._finds.take(context.remote_id.to_base58(), cost, loop_s()):
                return dht_pb2.FindResponse(results=[], peer=self.node_info)
            if size > left:
                answer.results.append(dht_pb2.FindResult(type=dht_pb2.NOT_FOUND))
                continue
            one = dht_pb2.FindRequest(keys=[key], peer=request.peer)
            answer.results.extend((await super().rpc_find(one, context)).results)
            left -= size
        return answer

    def _stored_bytes(self, key: bytes) -> int:
        """The approximate size of the value stored here for a key, in bytes."""
        found = self.storage.get(DHTID.from_bytes(key))
        return 0 if found is None else size_of(found.value)

    async def update_routing_table(
        self, node_id: Any, peer_id: Any, responded: bool = True
    ) -> None:
        """Add a peer to the routing table, only at the place that its key gives it."""
        if node_id is not None and node_id != node_id_of(peer_id):
            self.misplaced += 1
            return
        await super().update_routing_table(node_id, peer_id, responded)

    async def call_store(
        self, peer: Any, keys: Any, values: Any, *args: Any, **kwargs: Any
    ) -> list[bool] | None:
        """Store values at a peer; what a newcomer is handed counts as if it had asked for it."""
        handed = sum(map(size_of, values))
        if handed and not self._finds.take(peer.to_base58(), handed, loop_s()):
            return None
        stored: list[bool] | None = await super().call_store(peer, keys, values, *args, **kwargs)
        accepted = _accepted.get()
        if accepted is not None and stored:
            accepted.extend(stored)
        return stored

    async def call_find(self, peer: Any, keys: Any) -> Any:
        """What a peer has under ``keys``: by key its records, or None, and whom it knows nearby.

        None where it does not answer, or not as our nodes do.
        """
        keys = list(keys)
        asked = dht_pb2.FindRequest(keys=[key.to_bytes() for key in keys], peer=self.node_info)
        token = _bringer.set(peer.to_base58())
        try:
            async with self.rpc_semaphore:
                answer = await self.get_stub(peer).rpc_find(asked, timeout=self.wait_timeout)
            found = await self._found_by(peer, keys, answer)
            if len(answer.peer.node_id) == DHTID.HASH_NBYTES:
                await self.update_routing_table(DHTID.from_bytes(answer.peer.node_id), peer)
        except Exception as error:  # noqa: BLE001  (hivemind's calls fail with errors of all kinds)
            _log.debug("peer %s gave no answer to a search: %s", peer, error)
            place = self.routing_table.get(peer_id=peer)
            await self.update_routing_table(place, peer, responded=False)
            return None
        finally:
            _bringer.reset(token)
        return found

    async def _found_by(self, peer: Any, keys: list[Any], answer: dht_pb2.FindResponse) -> Any:
        if len(answer.results) != len(keys):
            raise MalformedError(f"{len(answer.results)} results for {len(keys)} keys")
        fits = self._found.take(peer.to_base58(), answer.ByteSize(), loop_s())
        found = {}
        for key, result in zip(keys, answer.results, strict=True):
            # A plain value is nobody's record.
            holds = fits and result.type == dht_pb2.FOUND_DICTIONARY
            value = await self._found_records(key.to_bytes(), result.value) if holds else None
            found[key] = (value, neighbours_in(result))
        return found

    async def _found_records(self, key: bytes, data: bytes) -> Any:
        """The records in ``data`` that follow the rules, with the latest of their expiries.

        None where there are none. The expiry that the peer states for all of them counts nothing.
        """
        valid = DictionaryDHTValue()
        for entry in self._sent_entries(self.IS_DICTIONARY, data, 0.0):
            if self._is_valid(key, *entry):
                valid.store(*entry)
            await self._next_turn()
        if not valid:
            return None
        return ValueWithExpiration(valid, valid.latest_expiration_time)

    def evict(self, key: str, author: str) -> None:
        """Drop a record that the guard evicted."""
        found = self.storage.data.get(DHTID.generate(source=key))
        if found is not None and isinstance(found.value, DictionaryDHTValue):
            del found.value[author]


def size_of(value: Any) -> int:
    """The approximate size of all records under a key, in bytes; 0 for a single one."""
    if not isinstance(value, DictionaryDHTValue):
        return 0
    return sum(len(item.value) + len(name) for name, item in value.data.items())


def neighbours_in(result: dht_pb2.FindResult) -> dict[Any, Any]:
    """The first peers that an answer names, by place; those elsewhere than their keys say are not
    among them, so whoever answers does not choose the numbers that a table of them is made of."""
    named = zip(
        result.nearest_node_ids[:BUCKET_PEERS],
        result.nearest_peer_ids[:BUCKET_PEERS],
        strict=False,
    )
    near = {}
    for place, raw in named:
        if len(raw) <= PEER_ID_BYTES_MAX:
            peer = PeerID(raw)
            if (right := node_id_of(peer)).to_bytes() == place:
                near[right] = peer
    return near


async def create_node(p2p: Any, guard: RecordGuard, rejected: Counter[str], budget: Budget) -> Any:
    """A DHT node on ``p2p`` that knows no peer yet; ``guard`` checks and keeps its records."""
    validator = RecordValidator(guard, rejected)
    # In client mode the stock protocol registers no handlers; ours replaces it below.
    node = await DHTNode.create(
        p2p,
        node_id=node_id_of(p2p.peer_id),
        num_replicas=REPLICAS,
        bucket_size=BUCKET_PEERS,
        depth_modulo=DEPTH_MODULO,
        wait_timeout=RPC_LIMIT_S,
        # No copies outside the replicas, where they would only go stale: records live for seconds.
        cache_locally=False,
        cache_nearest=0,
        cache_on_store=False,
        cache_refresh_before_expiry=0,
        reuse_get_requests=False,
        client_mode=True,
        record_validator=validator,
    )
    protocol = await RecordProtocol.create(
        p2p,
        node.node_id,
        BUCKET_PEERS,
        DEPTH_MODULO,
        REPLICAS,
        RPC_LIMIT_S,
        client_mode=False,
        record_validator=validator,
    )
    protocol.use(budget)
    node.protocol = protocol
    guard.on_evict = protocol.evict
    return node


async def greet(node: Any, peer_id: str) -> None:
    """Exchange places in the routing tables with a peer, which calls this node back.

    The caller sets the time limit: the peer may be busy. Raises NetworkError for a peer without a
    DHT node.
    """
    peer = PeerID.from_base58(peer_id)
    protocol = node.protocol
    asked = dht_pb2.PingRequest(peer=protocol.node_info, validate=True)
    try:
        answer = await protocol.get_stub(peer).rpc_ping(asked)
    except (P2PDaemonError, P2PHandlerError) as error:
        raise NetworkError(
            f"peer {peer_id} is there but is no member of a swarm: {error}"
        ) from None
    skew_s = answer.dht_time - get_dht_time()
    if not answer.available:
        # A peer behind a firewall can still serve.
        _log.warning("peer %s cannot call this peer back: is a firewall in between?", peer_id)
    elif abs(skew_s) > MAX_DHT_TIME_DISCREPANCY_SECONDS:
        # Only a warning: records' expiries have slack for clocks.
        _log.warning("the clock of peer %s differs by %.1f s from this one", peer_id, skew_s)
    await protocol.update_routing_table(node_id_of(peer), peer)


async def store(node: Any, record: SignedRecord, data: bytes) -> bool:
    """Store ``record``, whose value is ``data``; returns whether any replica has it.

    The record counts as brought by its author. hivemind itself reports only the last answer, which
    one refusing peer can spoil.
    """
    accepted: list[bool] = []
    token, brought = _accepted.set(accepted), _bringer.set(record.peer_id)
    try:
        stored = await node.store(
            record.key,
            data,
            expiration_time=record.expires_unix_s,
            subkey=record.peer_id,
            # No wider than the replicas: each further peer costs one more request.
            beam_size=REPLICAS,
        )
    finally:
        _accepted.reset(token)
        _bringer.reset(brought)
    return bool(stored) or any(accepted)
