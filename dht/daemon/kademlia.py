"""Runs hivemind's Kademlia node under our rules for records. Imports hivemind: import it lazily.

Stock nodes refuse a whole dictionary for one bad entry, so a record that has just expired would
hide all others; here each entry is judged alone. Stock nodes also trust the expiry that a replica
states for a whole dictionary, by which one peer can end a search early.
"""

import logging
import math
from collections import Counter
from contextvars import ContextVar
from typing import Any

import msgspec
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.proto import dht_pb2
from hivemind.utils import MAX_DHT_TIME_DISCREPANCY_SECONDS, get_dht_time

from dht.budget import DHT_BULK_STORES, DHT_FIND_BYTES, DHT_PINGS, DHT_STORES, Budget
from dht.errors import NetworkError, PeerError
from dht.messages.peer import SignedRecord
from dht.messages.types import PEERS_MAX
from dht.records.signed import RecordError, RecordGuard

REPLICAS = 8
BUCKET_PEERS = 20
DEPTH_MODULO = 5
RPC_LIMIT_S = 3.0
OWN_STORES_MAX = 4
"""Maximum values in the request of a peer that stores its own records."""
FIND_KEYS_MAX = 16
"""Maximum keys in one find request; our nodes ask for four at most."""
FIND_BYTES_MAX = 3 << 20
"""Maximum bytes of values in one answer: hivemind's daemon takes messages of 4 MiB, and does not
deliver longer ones."""
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
        except (PeerError, msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            self.rejected[type(error).__name__] += 1
            _log.debug("refused a DHT record: %s", error)
            return False
        return True

    def _admit(self, record: DHTRecord) -> None:
        # A plain value has the subkey None, a whole dictionary an empty one: neither is a string.
        author = msgspec.msgpack.decode(record.subkey, type=str)
        data = msgspec.msgpack.decode(record.value, type=bytes)

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


class RecordProtocol(DHTProtocol):  # type: ignore[misc]
    """The node's RPCs, with per-entry validation, rate limits, and places that follow from keys."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.use(Budget())
        self.misplaced = 0
        """Number of claims to another place in the DHT than the peer's key gives."""

    def use(self, budget: Budget) -> None:
        """Count what other peers take from here on in ``budget``."""
        self._stores = budget.rate(DHT_STORES)
        self._bulk = budget.rate(DHT_BULK_STORES)
        self._finds = budget.rate(DHT_FIND_BYTES)
        self._pings = budget.rate(DHT_PINGS)

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        # The stock name: peers of one network may run different subclasses.
        name = f"{DHTProtocol.__name__}.{method_name}"
        return name if namespace is None else f"{namespace}::{name}"

    async def rpc_ping(
        self, request: dht_pb2.PingRequest, context: P2PContext
    ) -> dht_pb2.PingResponse:
        """Answer a greeting; beyond a peer's rate without calling it back or taking it up."""
        now_s: float = get_dht_time()
        if not self._pings.take(context.remote_id.to_base58(), 1, now_s):
            return dht_pb2.PingResponse(peer=self.node_info, dht_time=now_s, available=False)
        return await super().rpc_ping(request, context)

    async def rpc_store(
        self, request: dht_pb2.StoreRequest, context: P2PContext
    ) -> dht_pb2.StoreResponse:
        """Store values for another peer, within its rate."""
        count = len(request.keys)
        # Our nodes cache nothing at others: a request for it asks for memory without accounting.
        if any(request.in_cache) or not self._within_rates(context.remote_id, count):
            return dht_pb2.StoreResponse(store_ok=[False] * count, peer=self.node_info)
        token = _bringer.set(context.remote_id.to_base58())
        try:
            return await super().rpc_store(request, context)
        finally:
            _bringer.reset(token)

    async def rpc_find(
        self, request: dht_pb2.FindRequest, context: P2PContext
    ) -> dht_pb2.FindResponse:
        """Values and neighbours for a few different keys, within the peer's rate in bytes.

        Values that would make the answer too long are left out, as if they were not stored here.
        """
        keys = list(request.keys)
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
            now_s: float = get_dht_time()
            cost = size + ASKED_KEY_BYTES
            if not self._finds.take(context.remote_id.to_base58(), cost, now_s):
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
        if found is None:
            return 0
        if not isinstance(found.value, DictionaryDHTValue):
            return len(found.value)
        return sum(len(item.value) + len(name) for name, item in found.value.data.items())

    async def update_routing_table(
        self, node_id: Any, peer_id: Any, responded: bool = True
    ) -> None:
        """Add a peer to the routing table, only at the place that its key gives it."""
        if node_id is not None and node_id != node_id_of(peer_id):
            self.misplaced += 1
            return
        await super().update_routing_table(node_id, peer_id, responded)

    async def call_store(self, *args: Any, **kwargs: Any) -> list[bool] | None:
        stored: list[bool] | None = await super().call_store(*args, **kwargs)
        accepted = _accepted.get()
        if accepted is not None and stored:
            accepted.extend(stored)
        return stored

    async def call_find(self, peer: Any, keys: Any) -> Any:
        token = _bringer.set(peer.to_base58())
        try:
            found = await super().call_find(peer, keys)
        finally:
            _bringer.reset(token)
        if not found:
            return found
        return {
            key: (
                _restated(value),
                {place: near for place, near in nearest.items() if place == node_id_of(near)},
            )
            for key, (value, nearest) in found.items()
        }

    def _validate_dictionary(self, key_bytes: bytes, dictionary: DictionaryDHTValue) -> bool:
        """Drop the entries that break the rules; returns whether any are left."""
        if not isinstance(dictionary, DictionaryDHTValue) or len(dictionary.data) > PEERS_MAX:
            return False
        for subkey, (value, expires_s) in list(dictionary.data.items()):
            if not (
                isinstance(subkey, str)
                and isinstance(value, bytes)
                and self._validate_record(
                    key_bytes, self.serializer.dumps(subkey), value, expires_s
                )
            ):
                del dictionary[subkey]
        dictionary.maxsize = math.inf
        dictionary.latest_expiration_time = max(
            (item.expiration_time for item in dictionary.data.values()), default=-math.inf
        )
        return len(dictionary.data) > 0

    def evict(self, key: str, author: str) -> None:
        """Drop a record that the guard evicted."""
        found = self.storage.data.get(DHTID.generate(source=key))
        if found is not None and isinstance(found.value, DictionaryDHTValue):
            del found.value[author]

    def _within_rates(self, peer: Any, count: int) -> bool:
        now_s: float = get_dht_time()
        if not self._stores.take(peer.to_base58(), count, now_s):
            return False
        return count <= OWN_STORES_MAX or self._bulk.take(peer.to_base58(), count, now_s)


def _restated(found: Any) -> Any:
    """A value found at one peer, with the expiry of its latest entry instead of the stated one."""
    if found is None or not isinstance(found.value, DictionaryDHTValue):
        return None
    return type(found)(found.value, found.value.latest_expiration_time)


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
