"""The drafts of a stage's sessions: what the first stage proposes, and what came of it."""

import asyncio
from collections import Counter
from collections.abc import Sequence

from coordinator.links.chunk_sizer import ChunkSizer
from node.drafting.pace import StepCost
from node.drafting.session_drafts import SessionDrafts
from node.engine.work_item import WorkItem
from node.sessions.session_table import Live, SessionTable
from node.stage.config import StageConfig, StageEngine


class StageDrafting:
    """Drafts tokens of the sessions whose first stage this is."""

    def __init__(
        self,
        engine: StageEngine,
        config: StageConfig,
        table: SessionTable,
        sizer: ChunkSizer,
        counters: Counter[str],
    ) -> None:
        self._engine = engine
        self._config = config
        self._table = table
        self._sizer = sizer
        self._counters = counters
        self._cost = StepCost()

    def drafts(self, live: Live) -> tuple[int, ...]:
        """Tokens to run behind the session's newest one, as many as pay."""
        session = live.session
        if not session.open.draft_tokens or session.is_warming or self._engine.state_tokens:
            return ()
        if session.unknown:  # a drafter follows no placeholders
            return ()
        if live.drafting is None:
            if self._table.holding > self._config.drafting_sessions_max:
                return ()
            live.drafting = SessionDrafts(drafter=self._config.drafter())
        most = session.drafts_most
        if not most:
            live.drafting.follow(session.inputs)
            return ()
        others_s = self._cost.others_s(len(session.open.route), self._sizer.row_s)
        return live.drafting.propose(session.inputs, most, others_s)

    def sent(self, live: Live) -> None:
        """A chunk of the session left, with its drafts."""
        session = live.session
        if live.drafting is not None and session.decodes:
            live.drafting.sent(len(session.drafts), asyncio.get_running_loop().time())
            self._counters["drafted"] += len(session.drafts)

    def came(self, live: Live, token_ids: Sequence[int]) -> None:
        """A round is over: the accepted drafts and one more token came."""
        self._counters["accepted_drafts"] += len(token_ids) - 1
        if live.drafting is not None:
            live.drafting.came(token_ids, asyncio.get_running_loop().time())

    def ran(self, items: Sequence[WorkItem], took_s: float) -> None:
        """Learn what drafted rows cost from a step of decodes alone."""
        drafted = sum(len(item.drafts) for item in items)
        self._cost.ran(len(items), drafted, took_s, self._sizer.fixed_s)
