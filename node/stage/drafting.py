"""The drafts of a stage's sessions: what the first stage proposes, and what came of it."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from node.drafting.chain import ModelDrafts
from node.drafting.pace import StepCost
from node.drafting.session_drafts import SessionDrafts, Wait
from node.engine.work_item import WorkItem
from node.sessions.session_table import Live
from node.stage.shell import StageShell


class StageDrafting:
    """Drafts tokens of the sessions whose first stage this is."""

    def __init__(self, shell: StageShell, push: Callable[[Live], None]) -> None:
        """``push`` is called for a session whose chunk waited for drafts."""
        self._engine = shell.engine
        self._config = shell.config
        self._table = shell.table
        self._sizer = shell.sizer
        self._counters = shell.counters
        self._push = push
        self._cost = StepCost()

    def drafts(self, live: Live) -> tuple[int, ...] | None:
        """Tokens to run behind the session's newest one, as many as pay.

        None where they are about to be there: ``push`` is called then.
        """
        session = live.session
        if not session.open.draft_tokens or session.is_warming or self._engine.state_tokens:
            return ()
        if session.unknown:  # a drafter follows no placeholders
            return ()
        if live.drafting is None:
            if self._table.holding > self._config.drafting_sessions_max:
                return ()
            live.drafting = SessionDrafts(drafter=self._config.drafter())
        drafting, most = live.drafting, session.drafts_most
        if not most:
            drafting.follow(session.inputs)
            return ()
        if drafting.model is None:
            drafting.model = self._model(live)
        loop = asyncio.get_running_loop()
        others_s = self._cost.others_s(len(session.open.route), self._sizer.row_s)
        drafts = drafting.propose(session.inputs, most, others_s, loop.time())
        if not isinstance(drafts, Wait):
            return drafts
        loop.call_at(drafts.until_s, self._resume, live, drafting)
        return None

    def _model(self, live: Live) -> ModelDrafts | None:
        """The draft model's part in a session, if there is one with room for it."""
        session, runner = live.session, self._config.draft_model
        key, drafting = session.kv_key, live.drafting
        if runner is None or not runner.open(key, session.kv_tokens):
            return None
        told = partial(self._resume, live, drafting)
        return ModelDrafts(runner, key, session.open.sampling, told)

    def _resume(self, live: Live, drafting: SessionDrafts | None) -> None:
        """Go on with a session whose chunk waits for drafts."""
        current = self._table.get(live.session.key) is live and live.drafting is drafting
        if current and drafting is not None and drafting.waits:
            self._push(live)

    def sent(self, live: Live) -> None:
        """A chunk of the session left, with its drafts."""
        session = live.session
        if live.drafting is not None and session.decodes:
            live.drafting.sent(len(session.drafts), asyncio.get_running_loop().time())
            self._counters["drafted"] += len(session.drafts)
            self._counters[f"drafted_by_{live.drafting.source}"] += len(session.drafts)

    def came(self, live: Live, token_ids: Sequence[int]) -> None:
        """A round is over: the accepted drafts and one more token came."""
        self._counters["accepted_drafts"] += len(token_ids) - 1
        if live.drafting is not None:
            self._counters[f"accepted_by_{live.drafting.source}"] += len(token_ids) - 1
            live.drafting.came(token_ids, asyncio.get_running_loop().time())

    def foretold(self, live: Live, known: int, token_ids: tuple[int, ...]) -> None:
        """The model's own head, at the last stage, drafts these behind the ``known`` tokens so far.

        That stage may be a stranger's: a token that the model does not have is left out, and all
        behind it.
        """
        if live.drafting is None or not token_ids:
            return
        vocab = self._engine.view.vocab
        sound = next((at for at, each in enumerate(token_ids) if each >= vocab), len(token_ids))
        if sound < len(token_ids):
            self._counters["strange_drafts"] += len(token_ids) - sound
        live.drafting.foretell(known, token_ids[:sound])

    def ran(self, items: Sequence[WorkItem], took_s: float) -> None:
        """Learn what drafted rows cost from a step of decodes alone."""
        drafted = sum(len(item.drafts) for item in items)
        self._cost.ran(len(items), drafted, took_s, self._sizer.fixed_s)
