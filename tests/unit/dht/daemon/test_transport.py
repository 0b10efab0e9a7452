"""A peer whose daemon stands still says so, and is not left to look cut off."""

import asyncio
import logging
from collections.abc import Iterator

import pytest

from dht.daemon.transport import SILENCE, HivemindTransport, _quiet_hivemind
from dht.errors import MachineError, NetworkError
from dht.identity.peer_id import Identity
from dht.transport.config import TransportConfig


class _Asks(HivemindTransport):
    """Asks a daemon that answers, fails or stands still in turn."""

    def __init__(self, turns: Iterator[str]) -> None:
        super().__init__(TransportConfig(identity=Identity.generate()))
        self._turns = turns

    async def _read_addresses(self) -> None:
        match next(self._turns):
            case "fails":
                raise NetworkError("it closed the connection")
            case "stands":
                await asyncio.Event().wait()
            case "ends":
                raise EOFError


@pytest.mark.virtual(limit_s=3600)
async def test_a_daemon_that_stands_still_ends_its_peer_with_words() -> None:
    asks = _Asks(iter(["answers", "fails", *["stands"] * SILENCE.silent_max, "ends"]))
    with pytest.raises(MachineError, match="no longer answers: it was stopped"):
        await asks._keep_addresses()


@pytest.mark.virtual(limit_s=3600)
async def test_a_daemon_that_was_slow_for_a_while_ends_nothing() -> None:
    slow = ["stands"] * (SILENCE.silent_max - 1)
    asks = _Asks(iter([*slow, "answers", *slow, "answers", "fails", "ends"]))
    with pytest.raises(EOFError):
        await asks._keep_addresses()


def test_a_programs_own_warnings_keep_their_name() -> None:
    _quiet_hivemind()
    assert logging.getLevelName(logging.WARNING) == "WARNING"
