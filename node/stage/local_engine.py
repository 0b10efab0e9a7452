"""Runs the engine in a worker thread, behind the interface of the stage server and the peer."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from coordinator.plans.catalogue.precision import precision_text
from coordinator.policies.batching.scheduler import limits_of
from dht.errors import MachineError, NetworkError, UserError
from dht.messages.types import NodeRecord
from node.engine.engine import DeviceLostError, Engine, EngineConfig
from node.engine.head_drafts import HeadDrafts
from node.engine.work_item import WorkItem, WorkResult
from node.engine.worker import Worker
from node.kv.export import KvBytes, pack_kv
from node.kv.page_names import NO_NAMES, PageNames
from node.model.draft_head import DraftHead
from node.model.eagle_head import eagle_head
from node.model.own_head import own_head
from node.profiling.layer_profile import tokens_per_s
from node.profiling.layer_rates import Profile
from node.profiling.profile_cache import default_folder, profiled
from node.profiling.refined import RefinedTimes, StepSeen
from node.sampling.grammars import Grammars
from node.sessions.open_checks import StageView
from node.stage.draft_engine import DraftEngine
from node.weights.hashes import Progress
from node.weights.store import WeightStore

T = TypeVar("T")


class _GivenUpError(NetworkError):
    """Nobody waits any more for what a thread fetches or loads."""


logger = logging.getLogger(__name__)

HEAD_KV_SHARE_LEAST = 0.5
"""Minimum share of the KV room beside the last layer that a head must leave: a session that finds
no room has nothing of drafts."""

STEPS_MAX = 2048
"""Maximum steps that are kept until the next look at them, the newest."""


def step_seen(
    batch: Sequence[WorkItem], results: Sequence[WorkResult], seconds: float, layers: int
) -> StepSeen | None:
    """The step as it refines a layer's times; None where it says nothing of them.

    It must be of decodes alone, without drafts, or of one chunk of a prompt, over the same layers,
    without an error.
    The last layer's steps take the head's and the sampler's time, too, which is no layer's.
    """
    spans = {(item.start, item.end) for item in batch}
    decodes = all(item.tokens == 1 for item in batch)
    drafted = any(item.drafts for item in batch)
    if len(spans) != 1 or drafted or not (decodes or len(batch) == 1):
        return None
    ((start, end),) = spans
    if end == layers or any(result.error is not None for result in results):
        return None
    return StepSeen(
        decodes=decodes,
        rows=sum(item.tokens for item in batch),
        context_tokens=sum(item.position for item in batch) / len(batch),
        layers=end - start,
        seconds=seconds,
    )


def _head_of(engine: Engine, head: WeightStore | None, *, insists: bool) -> DraftHead | None:
    """The head that drafts at the last stage, if there is one. Raises UserError where ``head`` is
    none for this model, if the owner ``insists`` on it."""
    try:
        if head is not None:
            return eagle_head(engine.layout, head)
    except UserError as error:
        if insists:
            raise
        logger.warning("a head is left out: %s", error)
    return own_head(engine.layout)


class LocalEngine:
    """A :class:`node.stage.config.StageEngine` with an engine in this process."""

    def __init__(
        self,
        engine: Engine,
        profile: Profile,
        *,
        remembered: bool = False,
        heads: HeadDrafts | None = None,
    ) -> None:
        """``remembered``: whether the profile is from an earlier join; ``heads``: the head that
        drafts, held beside the last layer where it leaves enough room for KV."""
        self._engine = engine
        self.heads = heads
        self._serving = (0, 0)
        self.profile = profile
        self.remembered = remembered
        self.tokens_per_s = tokens_per_s(engine, profile)
        config, store = engine.config, engine.config.store
        self.spec, self.state_tokens = engine.spec, engine.state_tokens
        self.kv_tokens_min, self.page_tokens = engine.kv_tokens_min, config.page_tokens
        self.wire_dtype, self.is_local = config.dtype, store.is_local
        self.precision = precision_text(config.dtype, config.quantize)
        """Precision of the weights: the engine's dtype, or the quantisation of its layers."""
        self.grammar = Grammars(store.directory, engine.spec.vocab, store.config).state
        self._times = RefinedTimes(profile.fit, profile.prompt_fit if profile.prefills else None)
        self._steps: deque[StepSeen] = deque(maxlen=STEPS_MAX)
        """Steps that ran since they were last looked at: the engine's thread adds them."""
        self._on_results: Callable[[Sequence[WorkResult]], None] | None = None
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = self._loop.create_future()
        """Resolves to the reason once the device has failed for good."""
        self.drafts: DraftEngine | None = None
        """A draft model, held while this engine holds the first layer."""
        self._worker = Worker(
            lambda batch: self._watched(lambda: self._step(batch)),
            self._deliver,
            limits_of(profile.layer_s(), engine.layers_max, decode_s=profile.decode_s()),
        )
        self.times = self._worker.times
        """How the engine's time was spent."""
        self.drop, self.submit = self._worker.drop, self._worker.submit
        self.together = self._worker.together

    @classmethod
    async def open(
        cls,
        config: EngineConfig,
        *,
        profiles: Path | None = None,
        refresh_profile: bool = False,
        foretells: bool = True,
        head: WeightStore | None = None,
        insists: bool = True,
    ) -> "LocalEngine":
        """Build the engine and measure it, in a thread. Raises UserError.

        A profile in the folder ``profiles`` (default: the user's cache) saves the measurement.
        ``foretells``: whether a head may draft: the EAGLE-3 head in ``head``, or the model's own,
        if its checkpoint has one. ``insists``: whether a ``head`` that is none for the model is an
        error.
        """

        def build() -> tuple[Engine, HeadDrafts | None, Profile, bool]:
            engine = Engine(config)
            folder = profiles or default_folder()
            profile, remembered = profiled(engine, folder, refresh=refresh_profile)
            found = _head_of(engine, head, insists=insists) if foretells else None
            heads = None if found is None else HeadDrafts(found, config)
            return engine, heads, profile, remembered

        engine, heads, profile, remembered = await asyncio.to_thread(build)
        return cls(engine, profile, remembered=remembered, heads=heads)

    @property
    def kv_tokens(self) -> int:
        return self._engine.kv.tokens

    @property
    def view(self) -> StageView:
        start, end = self._serving
        spec = self.spec
        return StageView(
            fingerprint=spec.fingerprint,
            layers=spec.layers,
            context_tokens=spec.context_tokens,
            vocab=spec.vocab,
            start=start,
            end=end,
            serving=start < end,
        )

    @property
    def hidden(self) -> int:
        return self._engine.spec.activation_bytes // self._engine.layout.dtype.itemsize

    @property
    def carries_more(self) -> bool:
        """Whether rows carry more than hidden states, such as integers, which int8 would ruin."""
        structure = self._engine.layout.structure
        return structure.row_width > structure.width

    async def fetch(self, start: int, end: int, progress: Progress) -> None:
        """Download the files of layers ``[start, end)`` while sessions go on over other layers.

        What came stays where it is cancelled. Raises UserError and NetworkError.
        """
        with self._given_up(progress) as report:
            await asyncio.to_thread(self._engine.loaded.fetch, start, end, report)
        if self.heads is not None and self._left_for_head(start, end):
            await asyncio.to_thread(self.heads.fetch)

    async def load(self, start: int, end: int, progress: Progress) -> int:
        """Hold exactly layers ``[start, end)``; returns bytes read. No session may be live. A load
        that is cancelled ends soon, and nothing is held then."""
        if self.drafts is not None:
            await self.drafts.hold(wanted=start == 0)
        with self._given_up(progress) as report:
            return await self._worker.call(
                lambda: self._watched(lambda: self._load(start, end, report))
            )

    def _left_for_head(self, start: int, end: int) -> int:
        """Bytes of the lent memory that the head takes beside layers ``[start, end)``; 0 where it
        is not held."""
        engine = self._engine
        if self.heads is None or end != engine.spec.layers:
            return 0
        left_bytes = self.heads.left_bytes(embeds=start == 0 or engine.layout.tied)
        tokens = engine.kv_tokens_beside(start, end, left_bytes)
        least = max(engine.kv_tokens_min, HEAD_KV_SHARE_LEAST * engine.kv_tokens_beside(start, end))
        return left_bytes if tokens >= least else 0

    def _load(self, start: int, end: int, report: Progress) -> int:
        """Load layers ``[start, end)``, and beside the last one the head that drafts."""
        if self.heads is not None:
            self.heads.unload()
        left_bytes = self._left_for_head(start, end)
        try:
            read_bytes = self._engine.load(start, end, report, left_bytes=left_bytes)
        except _GivenUpError:
            self._unload()
            raise
        if self.heads is not None and left_bytes:
            try:
                self.heads.load(self._engine.loaded)
            except DeviceLostError:
                raise
            except (UserError, MachineError, NetworkError, RuntimeError, OSError):
                logger.exception("the head that drafts cannot be loaded")
                self.heads.unload()
        return read_bytes

    def _unload(self) -> None:
        if self.heads is not None:
            self.heads.unload()
        self._engine.unload()

    async def unload(self) -> None:
        """Free the memory of weights and KV. No session may be live."""
        if self.drafts is not None:
            await self.drafts.hold(wanted=False)
        await self._worker.call(self._unload)

    def start_serving(self, start: int, end: int) -> None:
        """Accept sessions over layers ``[start, end)`` from now on."""
        self._serving = (start, end)

    def stop_serving(self) -> None:
        """Refuse new sessions."""
        self._serving = (0, 0)

    def open_kv(
        self,
        key: str,
        tokens: int,
        layers: tuple[int, int],
        likely_tokens: int,
        names: PageNames = NO_NAMES,
    ) -> int:
        kept = self._engine.kv.open(key, tokens, layers, likely_tokens, names)
        if self.heads is not None and layers[1] == self._engine.spec.layers:
            self.heads.open(key, tokens)
        return kept

    def keep_no_more(self, key: str) -> None:
        self._engine.kv.keep_no_more(key)

    def settle(self, key: str, tokens: int) -> None:
        self._engine.kv.settle(key, tokens)

    def extend_kv(self, key: str, tokens: int) -> bool:
        return self._engine.kv.extend(key, tokens)

    def free(self, key: str) -> None:
        self._worker.drop(key)
        self._engine.kv.free(key)
        if self.heads is not None:
            self.heads.free(key)

    def resumable(self, key: str, position: int) -> int:
        return self._engine.kv.resumable(key, position)

    def kv_row_bytes(self, start: int, end: int) -> int:
        return self._engine.spec.kv_bytes_per_token_layer * (end - start)

    async def export_kv(self, key: str, position: int, tokens: int) -> bytes:
        """Read a session's KV between steps; see :meth:`node.kv.pool.KvPool.take`."""
        engine = self._engine
        return await self._worker.call(lambda: pack_kv(engine.kv.take(key, position, tokens)))

    async def import_kv(
        self, key: str, layers: tuple[int, int], position: int, tokens: int, body: bytes
    ) -> str | None:
        """Append KV to a reservation; see :meth:`node.kv.pool.KvPool.put`."""
        packed = KvBytes(
            start=layers[0], end=layers[1], position=position, tokens=tokens, body=body
        )
        return await self._worker.call(lambda: self._engine.kv.put(key, packed))

    async def run_rows(self, start: int, end: int, rows: torch.Tensor) -> torch.Tensor | None:
        """Output of layers for hidden states, ``[rows, width]``, between steps; None where they are
        not held or there is no room: see :meth:`node.engine.engine.Engine.run_rows`."""
        return await self._worker.call(
            lambda: self._watched(lambda: self._engine.run_rows(start, end, rows))
        )

    async def turn(self) -> None:
        """Wait until the engine's thread is between steps."""
        await self._worker.call(lambda: None)

    @property
    def backlog_tokens(self) -> int:
        return self._worker.backlog_tokens

    def start(self, on_results: Callable[[Sequence[WorkResult]], None]) -> None:
        self._on_results = on_results

    def close(self) -> None:
        """End the worker's thread."""
        if self.drafts is not None:
            self.drafts.close()
        self._worker.stop()

    def refined(self, record: NodeRecord) -> NodeRecord:
        """``record`` with layer times as real steps have refined them, and with what is held."""
        seen = [self._steps.popleft() for _ in range(len(self._steps))]
        self._times.take(seen, self._loop.time())
        return replace(
            record,
            decode_layer_ns=self._times.decode_times,
            prompt_layer_ns=self._times.prompt_times,
            foretells=self.heads is not None and self.heads.held,
            feature_layers=self.heads.feature_layers if self.heads and self.heads.held else (),
        )

    def _step(self, batch: Sequence[WorkItem]) -> list[WorkResult]:
        started_s = time.perf_counter()
        results = self._engine.step(batch)
        seen = step_seen(batch, results, time.perf_counter() - started_s, self.spec.layers)
        if seen is not None:
            self._steps.append(seen)
        return results if self.heads is None else self.heads.follow(results)

    def _deliver(self, results: Sequence[WorkResult]) -> None:
        if self._on_results is not None:
            self._on_results(results)

    def _tell_lost(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)

    @contextmanager
    def _given_up(self, progress: Progress) -> Iterator[Progress]:
        """``progress`` for another thread to call, whose work ends there once the block has."""
        report, ended = self._in_loop(progress), threading.Event()

        def report_on(done_bytes: int, total_bytes: int) -> None:
            if ended.is_set():
                raise _GivenUpError("nobody waits for this any more")
            report(done_bytes, total_bytes)

        try:
            yield report_on
        finally:
            ended.set()

    def _in_loop(self, progress: Progress) -> Progress:
        """``progress`` for the engine's thread to call."""

        def report(done_bytes: int, total_bytes: int) -> None:
            self._loop.call_soon_threadsafe(progress, done_bytes, total_bytes)

        return report

    def _watched(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the engine's thread; set ``lost`` if it raises DeviceLostError."""
        try:
            return work()
        except DeviceLostError as error:
            self._loop.call_soon_threadsafe(self._tell_lost, str(error))
            raise
