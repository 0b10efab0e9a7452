"""Drafts by a head, behind the steps of a last stage: the model's own (:mod:`node.model.own_head`)
or an EAGLE-3 head (:mod:`node.model.eagle_head`).

The head's layer has a row for each position whose next token is known, and KV of its own for them.
In a session it begins with the first row that runs here. Where rows are missing it begins anew
behind them: what it attends to changes how often its drafts are right, never the answer. Rows of
drafted tokens are written behind the certain ones, which overwrite them as they come.
"""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from dht.messages.session import SESSION_BOUNDS
from node.device.tensors import to_device
from node.drafting.chain import draft_sampling
from node.drafting.config import drafter_bytes
from node.drafting.head_pace import HeadPace
from node.engine.batch_rows import joined
from node.engine.engine import Engine, EngineConfig
from node.engine.work_item import WorkItem, WorkResult
from node.model.draft_head import DraftHead, Enter
from node.model.layer_range import LoadedRange

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _Rows:
    """The head's rows in one session; only the engine's thread changes them."""

    most: int
    """Maximum number of rows; 0 once the head failed here."""
    first: int = 0
    """Position of the first row."""
    next: int = -1
    """Position behind the last certain row; -1: none was run."""
    pace: HeadPace = field(default_factory=HeadPace)


@dataclass(slots=True, kw_only=True)
class _Chain:
    """One session's drafts behind one step."""

    result: WorkResult
    rows: _Rows
    position: int
    """Position of the rows that are run next."""
    token_ids: tuple[int, ...]
    """Ids of the tokens behind those rows."""
    behind: torch.Tensor
    """What the head joins with these tokens, a row for each."""
    count: int
    drawn: list[int] = field(default_factory=list)


class HeadDrafts:
    """Runs a head in the engine's thread, over what a step left."""

    def __init__(self, head: DraftHead, config: EngineConfig) -> None:
        """``config``: of the engine whose sessions are drafted."""
        self._head = head
        spec = head.layout.spec(config.name)
        self._config = replace(
            config,
            layout=head.layout,
            store=head.layout.store,
            keep_prefixes=False,
            threads=None,
            memory_bytes=drafter_bytes(spec),
        )
        self._engine = Engine(self._config)
        self._vocab = spec.vocab
        self._entry: Enter | None = None
        self._beside: LoadedRange | None = None
        self._rows: dict[str, _Rows] = {}
        """Rows of sessions by name; only the event loop's thread adds and removes sessions."""

    def left_bytes(self, *, embeds: bool) -> int:
        """Memory that the head takes beside the last layer, with which it may share parts;
        ``embeds``: whether the model's embedding is there, too."""
        return self._config.memory_bytes + self._head.more_bytes(embeds=embeds)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers in front of which the head takes a token's hidden states."""
        return self._head.feature_layers

    @property
    def held(self) -> bool:
        """Whether its weights are here."""
        return self._entry is not None

    def fetch(self) -> None:
        """Download its files. Raises UserError and NetworkError."""
        self._engine.loaded.fetch(0, 1)
        self._head.fetch()

    def load(self, beside: LoadedRange) -> None:
        """Hold the head, with the parts of ``beside`` that it shares. Sessions must have ended.

        Raises UserError, MachineError and NetworkError.
        """
        self._beside, loaded = beside, self._engine.loaded
        loaded.lend(self._head.lent(beside))
        self._engine.load(0, 1)
        with torch.inference_mode():
            self._entry = self._head.entered(loaded, beside)

    def unload(self) -> None:
        """Free its memory; sessions must have ended."""
        self._entry = None
        if self._beside is not None:
            self._beside.behind = None
        self._engine.unload()

    def open(self, key: str, tokens: int) -> None:
        """Let a session of up to ``tokens`` tokens be drafted, as far as there is KV for it."""
        if self.held:
            most = min(
                tokens + SESSION_BOUNDS.draft_tokens_max + 1, self._engine.spec.context_tokens
            )
            self._engine.kv.open(key, most, (0, 1))
            self._rows[key] = _Rows(most=most)

    def free(self, key: str) -> None:
        if self._rows.pop(key, None) is not None:
            self._engine.kv.free(key)

    def follow(self, results: list[WorkResult]) -> list[WorkResult]:
        """Run the head over the rows that a step left; returns the step's results, with its drafts
        in ``foretold``."""
        if all(result.behind is None for result in results):
            return results
        try:
            with torch.inference_mode():
                told = self._foretold(results)
        except Exception:  # whatever the head does, answers go on without it
            logger.exception("the head that drafts failed")
            told = {}
            for result in results:
                if (rows := self._rows.get(result.item.session)) is not None:
                    rows.most = 0
        return [
            replace(result, behind=None, foretold=told.get(index, ()))
            for index, result in enumerate(results)
        ]

    def _foretold(self, results: Sequence[WorkResult]) -> dict[int, tuple[int, ...]]:
        chains = {
            index: chain
            for index, result in enumerate(results)
            if (chain := self._begun(result)) is not None
        }
        running = list(chains.values())
        while running:
            self._run(running)
            running = [chain for chain in running if len(chain.drawn) < chain.count]
        for chain in chains.values():
            chain.rows.pace.told(chain.drawn)
        return {index: tuple(chain.drawn) for index, chain in chains.items()}

    def _begun(self, result: WorkResult) -> _Chain | None:
        """The rows that a result adds in its session; None where there are none."""
        item, rows = result.item, self._rows.get(result.item.session)
        if result.behind is None or result.error is not None or not self.held:
            return None
        if rows is None or not rows.most:
            return None
        drawn = result.token_ids
        lacking = item.tokens - len(result.behind)  # rows at the beginning without what it joins
        certain = item.tokens - len(item.drafts) + max(0, len(drawn) - 1)
        begin = certain - len(drawn)  # the first row of which the draw tells what followed
        ids = drawn
        sound = all(0 <= each < self._vocab for each in item.following)  # a client told them
        if sound and len(item.following) >= begin:
            ids, begin = (*item.following[:begin], *drawn), 0
        ids, begin = ids[max(0, lacking - begin) :], max(lacking, begin)
        if not ids:
            return None
        position = item.position + begin
        if not rows.first <= position <= rows.next:
            rows.first = position
        rows.pace.came(drawn)
        end = begin + len(ids)
        rows.next = position + len(ids)
        return _Chain(
            result=result,
            rows=rows,
            position=position,
            token_ids=ids,
            behind=result.behind[begin - lacking : end - lacking],
            count=rows.pace.count if drawn else 0,
        )

    def _run(self, chains: Sequence[_Chain]) -> None:
        """One step of the head over the chains' next rows; those that cannot go on end."""
        chains = [chain for chain in chains if self._has_room(chain)]
        if not chains:
            return
        for result in self._engine.step(self._items(chains)):
            chain: _Chain = result.item.owner
            token_id = result.token_id
            if result.error is not None or result.behind is None:
                # Once: a head that fails costs steps, one by one, and a line in the log each time.
                logger.debug("a session is drafted no more: %s", result.error)
                chain.rows.most = 0
                self._end(chain)
            elif token_id is not None and 0 <= token_id < self._vocab:
                chain.position += len(chain.token_ids)
                chain.drawn.append(token_id)
                chain.token_ids, chain.behind = (token_id,), result.behind[-1:]
            else:
                chain.count = 0

    def _end(self, chain: _Chain) -> None:
        """Draft no further. If not even the certain rows were run, the head begins anew behind
        them."""
        chain.count = 0
        if not chain.drawn:
            chain.rows.next = -1

    def _has_room(self, chain: _Chain) -> bool:
        end = chain.position + len(chain.token_ids) - chain.rows.first
        key, most = chain.result.item.session, chain.rows.most
        if end <= most and self._engine.kv.extend(key, end):
            return True
        self._end(chain)
        return False

    def _items(self, chains: Sequence[_Chain]) -> list[WorkItem]:
        """Work for the chains' next rows, whose input is made in one go."""
        assert self._entry is not None  # noqa: S101 - for the type checker: it is held
        ids = list(itertools.chain.from_iterable(chain.token_ids for chain in chains))
        behind = joined([chain.behind for chain in chains])
        entered = self._entry(to_device(ids, self._engine.device), behind)
        parts = torch.split(entered, [len(chain.token_ids) for chain in chains])
        return [
            WorkItem(
                session=chain.result.item.session,
                start=0,
                end=1,
                position=chain.position - chain.rows.first,
                hidden=hidden,
                foretells=True,
                sampling=draft_sampling(asked) if chain.count and asked is not None else None,
                drawn_later=chain.rows.first + 1,
                owner=chain,
            )
            for chain, hidden in zip(chains, parts, strict=True)
            for asked in (chain.result.item.sampling,)
        ]
