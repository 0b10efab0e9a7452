"""How a consumer's commands reach a swarm, and leave it where they are cut off."""

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from client.remembering import lasting_swarm
from client.swarm.swarm import Swarm
from dht.errors import NetworkError, UserError


class Cut:
    """A transport whose daemon is killed after a while."""

    async def wait_ended(self) -> str:
        await asyncio.sleep(60)
        return "the p2p daemon is gone"


@asynccontextmanager
async def connected(*_: object, **__: object) -> AsyncIterator[SimpleNamespace]:
    yield SimpleNamespace(transport=Cut())


@pytest.mark.virtual(limit_s=1000)
async def test_a_command_that_serves_on_ends_where_it_is_cut_off_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Swarm, "connect", connected)
    arguments = argparse.Namespace(initial_peers=(), model="brook")
    with pytest.raises(NetworkError, match="daemon is gone"):
        async with lasting_swarm(arguments):
            await asyncio.Event().wait()
    with pytest.raises(UserError, match="its own"):
        async with lasting_swarm(arguments):
            raise UserError("its own")
