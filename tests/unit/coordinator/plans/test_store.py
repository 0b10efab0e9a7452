"""Plans come from strangers: reading one keeps nobody waiting."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.plans import store
from coordinator.plans.store import PlanStore
from dht.messages.codec import MalformedError
from dht.messages.types import PlanHead, PlanVersion


def test_a_plan_is_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have 8 MiB; 118 kB with 4,096 peers that hold all layers took 0.12 s."""
    read_in: list[threading.Thread] = []

    def decode(*_: object) -> None:
        read_in.append(threading.current_thread())
        raise MalformedError("no plan")

    monkeypatch.setattr(store, "decode_plan", decode)
    transport, directory = SimpleNamespace(peer_id="me"), SimpleNamespace(model_key="m")
    head = PlanHead(peer_id="author", version=PlanVersion(term=1), sha256="0" * 64, size_bytes=1)

    async def take() -> None:
        plans = PlanStore(cast(Any, transport), cast(Any, directory))
        assert not await plans._take(head, b"x")
        assert plans.counters["refused"] == 1

    asyncio.run(take())
    assert [thread is threading.main_thread() for thread in read_in] == [False]
