"""What a stage frees, keeps and tells when a session ends there."""

from dataclasses import replace

import pytest

from dht.identity.grant import own_word
from dht.messages.session import SessionFailed
from node.sessions import life, session_table
from node.sessions.session import StageState
from tests.unit.node.stage.test_kv_migration import Side, run


@pytest.mark.parametrize("kept", [0, 1])
def test_a_finished_answer_is_freed_once_and_kept_within_bounds(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_table, "FINISHED_PER_CLIENT_MAX", kept)

    async def scenario() -> None:
        side = Side(importing=False)
        (live,) = side.table
        side.shell.log.append(side.session.key, 0, bytes(4))
        side.shell.step(live, life.Completed())
        assert side.engine.ended == [side.session.kv_key]
        assert side.shell.log.bytes_held == side.table.holding == 0
        assert len(list(side.table)) == kept, "its client may attach late"
        side.shell.step(live, life.Expired())
        assert side.session.state is StageState.CLOSED
        assert list(side.table) == []
        assert side.engine.ended == [side.session.kv_key]
        side.shell.step(live, life.GivenUp(reason="too late"))
        assert not side.upstream.messages

    run(scenario())


def test_the_owner_hears_this_stage_s_signed_word() -> None:
    async def scenario() -> None:
        side = Side(importing=False)
        (live,) = side.table
        live.upstream, live.attached = side.upstream, side.hop  # type: ignore[assignment]
        side.shell.step(live, life.Lost(peer_id="p1", reason="silent"))
        assert side.upstream.messages == side.hop.messages
        (failed,) = side.upstream.messages
        assert isinstance(failed, SessionFailed)
        assert (failed.peer_id, failed.by) == ("p1", "p0")
        assert failed == own_word(replace(failed, signature=b""), side.shell.transport.sign)
        assert side.session.state is StageState.PAUSED

    run(scenario())
