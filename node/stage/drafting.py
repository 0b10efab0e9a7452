"""The drafts of a stage's sessions: what the first stage proposes, and what came of it."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from node.drafting.chain import ModelDrafts
from node.drafting.pace import StepCost
from node.drafting.session_drafts import SessionDrafts, Wait
from node.engine.work_item import WorkItem
from node.sessions.session_table import Live
from node.stage.shell import StagePart, StageShell


class StageDrafting(StagePart):
    """Drafts tokens of the sessions whose first stage this is."""

    def __init__(self, shell: StageShell, push: Callable[[Live], None]) -> None:
        """``push`` is called for a session whose chunk waited for drafts."""
        super().__init__(shell)
        self._sizer = shell.sizer
        self._push = push
        self._cost = StepCost()

    def drafts(self, live: Live) -> tuple[int, ...] | None:
        """Tokens to run behind the session's newest one, as many as pay.

        None where they are about to be there: ``push`` is called then.
        """
        session = live.session
        if session.is_warming or session.unknown:  # a drafter follows no placeholders
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

    def sent(self, drafting: SessionDrafts, count: int) -> None:
        """A chunk of a session left, with ``count`` drafts."""
        drafting.sent(count, asyncio.get_running_loop().time())
        self._counters["drafted"] += count
        self._counters[f"drafted_by_{drafting.source}"] += count

    def came(
        self,
        drafting: SessionDrafts,
        token_ids: Sequence[int],
        known: int,
        foretold: tuple[int, ...],
    ) -> None:
        """A round is over: the accepted drafts and one more token came.

        The model's own head, at the last stage, drafts ``foretold`` behind the ``known`` tokens so
        far. That stage may be a stranger's: a token that the model does not have is left out, and
        all behind it.
        """
        self._counters["accepted_drafts"] += len(token_ids) - 1
        self._counters[f"accepted_by_{drafting.source}"] += len(token_ids) - 1
        drafting.came(token_ids, asyncio.get_running_loop().time())
        if not foretold:
            return
        vocab = self._engine.view.vocab
        sound = next((at for at, each in enumerate(foretold) if each >= vocab), len(foretold))
        if sound < len(foretold):
            self._counters["strange_drafts"] += len(foretold) - sound
        drafting.foretell(known, foretold[:sound])

    def ran(self, items: Sequence[WorkItem], took_s: float) -> None:
        """Learn what drafted rows cost from a step of decodes alone."""
        drafted = sum(len(item.drafts) for item in items)
        self._cost.ran(len(items), drafted, took_s, self._sizer.fixed_s)
