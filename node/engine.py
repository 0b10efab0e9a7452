"""The engine: one batch of rows of many sessions through the layers that this peer holds.

Synchronous and used from one thread (:mod:`node.worker`), except :meth:`Engine.reserve` and
:meth:`Engine.free`, which a lock makes safe from another. Importable without hivemind.
"""

import itertools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dht.errors import UserError
from dht.messages import Sampling
from dht.types import ModelSpec, PlannerNode, fits, stage_bytes
from node.attention import LayerPool, Segment, Step, set_step
from node.kv_accounts import KvAccounts, Reservation
from node.model import LoadedRange, ModelLayout
from node.penalties import Draw
from node.sampling import draw_rows
from node.scoring import score_prompt, score_rows
from node.token_history import PromptTargets, TokenHistory
from node.weights import Progress, WeightStore

KV_TOKENS_LEAST_MAX = 2048
KV_TOKENS_MOST = 1 << 20


def kv_tokens_least(spec: ModelSpec) -> int:
    """KV tokens that a peer keeps per layer at least: one full context, but at most 2048."""
    return min(spec.context_tokens, KV_TOKENS_LEAST_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine is built from."""

    store: WeightStore
    name: str
    device: str = "cpu"
    dtype: str = "float32"
    memory_bytes: int
    """For weights and KV pages together."""
    page_tokens: int = 16
    threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkItem:
    """Rows of one session: layers ``[start, end)`` at ``position`` onwards.

    The first stage gets ``token_ids``, others ``hidden`` of shape ``[tokens, hidden]``. The last
    stage samples behind the last row when ``sampling`` is set.
    """

    session: str
    start: int
    end: int
    position: int
    token_ids: tuple[int, ...] | None = None
    hidden: torch.Tensor | None = None
    sampling: Sampling | None = None
    history: TokenHistory | None = None
    """What the sampling's penalties look at."""
    targets: PromptTargets | None = None
    """Last stage: tokens to score behind some of the rows."""

    @property
    def tokens(self) -> int:
        """Rows of this item."""
        if self.token_ids is not None:
            return len(self.token_ids)
        return 0 if self.hidden is None else int(self.hidden.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkResult:
    """What became of an item: hidden states for the next stage, a token, or an error."""

    item: WorkItem
    hidden: torch.Tensor | None = None
    token_id: int | None = None
    score: bytes = b""
    """Of the token, packed (:mod:`dht.scores`), where ``sampling.logprobs`` asks for it."""
    prompt_scores: bytes = b""
    """Of the item's ``targets``, packed."""
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class _Rows:
    """An item that takes part in a step, and its rows ``[first, last)`` in the packed batch."""

    index: int
    item: WorkItem
    reservation: Reservation
    first: int = 0
    last: int = 0
    segment: Segment = field(init=False)


class Engine:
    """Runs a contiguous range of layers for many sessions at once."""

    def __init__(self, config: EngineConfig) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.config = config
        self.device = torch.device(config.device)
        self.layout = ModelLayout.of(config.store, config.dtype)
        self.spec = self.layout.spec(config.name)
        self._width: int = self.layout.config.get_text_config().hidden_size
        self.kv_tokens_min = kv_tokens_least(self.spec)
        self.layers_max = self._count_layers()
        self.held = (0, 0)
        self.bytes_loaded = 0
        self._range = LoadedRange(self.layout, self.device)
        self._pools: dict[int, LayerPool] = {}
        self._lock = threading.Lock()
        self._accounts = KvAccounts(0, config.page_tokens)

    def _count_layers(self) -> int:
        """How many layers fit somewhere in the model; UserError when not even one does."""
        spec = self.spec
        node = PlannerNode(
            peer_id="self",
            memory_bytes=self.config.memory_bytes,
            kv_tokens_min=self.kv_tokens_min,
            tokens_per_s=(1.0,) * spec.layers,
        )
        spans = range(spec.layers, 0, -1)
        for count in spans:
            if any(fits(spec, node, at, at + count) for at in range(spec.layers - count + 1)):
                return count
        least = min(stage_bytes(spec, at, at + 1, self.kv_tokens_min) for at in range(spec.layers))
        raise UserError(self._too_little("one layer", least))

    def _too_little(self, wanted: str, least_bytes: int) -> str:
        least_gib = math.ceil(least_bytes / 2**30 * 10_000) / 10_000
        return (
            f"{self.config.memory_bytes / 2**30:.4f} GiB cannot hold {wanted} of {self.spec.name}:"
            f" --memory {least_gib:.4f} would do (GiB, with room for {self.kv_tokens_min} tokens)"
        )

    @property
    def kv_tokens_free(self) -> int:
        """Tokens that a new session could reserve here."""
        return self._accounts.free_tokens

    def load(self, start: int, end: int, progress: Progress | None = None) -> int:
        """Hold exactly layers ``[start, end)`` and give the rest of the memory to KV pages.

        Sessions must have ended: their KV is gone afterwards. Returns bytes read from disk.
        Raises UserError when the range does not fit the memory or cannot be run.
        """
        if not 0 <= start < end <= self.spec.layers:
            raise UserError(f"layers [{start}, {end}) asked of {self.spec.layers}")
        weights = stage_bytes(self.spec, start, end, 0)
        per_token = self.spec.kv_bytes_per_token_layer * (end - start)
        tokens = min((self.config.memory_bytes - weights) // per_token, KV_TOKENS_MOST)
        pages = tokens // self.config.page_tokens
        if pages < 1:
            least = stage_bytes(self.spec, start, end, self.kv_tokens_min)
            raise UserError(self._too_little(f"layers [{start}, {end})", least))
        self.held, self._pools = (0, 0), {}
        with self._lock:
            self._accounts = KvAccounts(0, self.config.page_tokens)
        self.bytes_loaded = self._range.set(start, end, progress)
        self._pools = {index: self._pool(pages) for index in range(start, end)}
        self._warm_up(start)
        with self._lock:
            self._accounts = KvAccounts(pages, self.config.page_tokens)
        self.held = (start, end)
        return self.bytes_loaded

    def _warm_up(self, index: int) -> None:
        """One row through one layer; UserError when its attention cannot be computed here."""
        segment = Segment(first=0, last=1, context_tokens=1, slots=slice(0, 1))
        step = Step(pools=self._pools, write_slots=slice(0, 1), segments=[segment])
        row = torch.zeros(1, self._width, dtype=self.layout.dtype, device=self.device)
        position = torch.zeros(1, dtype=torch.long, device=self.device)
        where = self.config.store.directory
        try:
            with torch.inference_mode():
                out = self._through(index, index + 1, step, row, position)
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
            raise UserError(f"{where} cannot be served yet: {error}") from error
        if step.calls != 1 or out.shape != row.shape:
            raise UserError(
                f"{where} cannot be served yet: its layers do not call attention through"
                " transformers' interface"
            )

    def _pool(self, pages: int) -> LayerPool:
        text = self.layout.config.get_text_config()
        heads = text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        shape = (pages * self.config.page_tokens, kv_heads, width)
        keys = torch.empty(shape, dtype=self.layout.dtype, device=self.device)
        return LayerPool(keys=keys, values=torch.empty_like(keys))

    def reserve(self, session: str, tokens: int) -> str | None:
        """Reserve KV for a whole session; the reason when there is no room."""
        with self._lock:
            return self._accounts.reserve(session, tokens)

    def free(self, session: str) -> None:
        """Give a session's KV back at once. Its items that still come get an error."""
        with self._lock:
            self._accounts.free(session)

    def step(self, items: Sequence[WorkItem]) -> list[WorkResult]:
        """Run one batch; results come in the order of the items.

        At most one item per session. An item of an unknown session, outside the layers held,
        beyond its reservation or past a position that was never run gets an error; the others go
        on. Earlier positions may be run again, and then those behind them must be, too.
        """
        results: list[WorkResult | None] = [None] * len(items)
        rows: list[_Rows] = []
        sessions: set[str] = set()
        for index, item in enumerate(items):
            with self._lock:
                reservation = self._accounts.get(item.session)
            error = self._refuse(item, reservation)
            if item.session in sessions:
                error = "two items of one session in a step"
            if error is not None or reservation is None:
                results[index] = WorkResult(item=item, error=error or "no KV is reserved")
            else:
                sessions.add(item.session)
                rows.append(_Rows(index=index, item=item, reservation=reservation))
        if rows:
            for row in rows:  # should the step fail, what it was to replace counts no longer
                row.reservation.written = row.item.position
            with torch.inference_mode():
                for row, result in zip(rows, self._run(rows), strict=True):
                    row.reservation.written = row.item.position + row.item.tokens
                    results[row.index] = result
        return [result for result in results if result is not None]

    def _refuse(self, item: WorkItem, reservation: Reservation | None) -> str | None:
        start, end = self.held
        if reservation is None:
            return "this session holds no KV here"
        if not start <= item.start < item.end <= end:
            return f"layers [{item.start}, {item.end}) asked, [{start}, {end}) held"
        if item.tokens < 1:
            return "an item without rows"
        if item.position < 0 or item.position + item.tokens > reservation.tokens:
            at = f"[{item.position}, {item.position + item.tokens})"
            return f"positions {at} asked, {reservation.tokens} reserved"
        if item.position > reservation.written:
            return f"position {item.position} asked, {reservation.written} comes next"
        if (item.token_ids is None) == (item.hidden is None):
            return "exactly one of token ids and hidden states is taken"
        if item.token_ids is not None:
            if item.start != 0:
                return "token ids are for the first layer"
            for token_id in (min(item.token_ids), max(item.token_ids)):
                if not 0 <= token_id < self.spec.vocab:
                    return f"token id {token_id} of a vocabulary of {self.spec.vocab}"
        elif item.hidden is not None and item.hidden.shape[1:] != (self._width,):
            shape = tuple(item.hidden.shape)
            return f"hidden states of shape {shape}, ({item.tokens}, {self._width}) expected"
        return None

    def _run(self, rows: list[_Rows]) -> list[WorkResult]:
        """Pack the rows, run each layer over those that need it, split the results.

        Rows are ordered by the layers they need, so that those active in a layer are few slices.
        """
        ordered = sorted(rows, key=lambda row: (row.item.start, row.item.end))
        at = 0
        for row in ordered:
            row.first, row.last = at, at + row.item.tokens
            at = row.last
        hidden = self._embed(ordered)
        positions = _joined([self._positions(row) for row in ordered])
        written = [self._slots(row) for row in ordered]
        slots = written[0] if len(written) == 1 else _joined([self._rows_of(w) for w in written])
        cuts = sorted({r.item.start for r in ordered} | {r.item.end for r in ordered})
        for start, end in itertools.pairwise(cuts):
            active = [r for r in ordered if r.item.start <= start < r.item.end]
            if active:
                hidden = self._run_layers(start, end, active, at, hidden, positions, slots)
        return self._results(rows, hidden)

    def _embed(self, rows: list[_Rows]) -> torch.Tensor:
        """Hidden states going in, ``[tokens, hidden]``."""
        parts = []
        for row in rows:
            if row.item.token_ids is not None and self._range.embed is not None:
                ids = torch.tensor(row.item.token_ids, device=self.device)
                parts.append(self._range.embed(ids))
            elif row.item.hidden is not None:
                parts.append(row.item.hidden.to(self.device, self.layout.dtype))
        return _joined(parts)

    def _positions(self, row: _Rows) -> torch.Tensor:
        at = row.item.position
        return torch.arange(at, at + row.item.tokens, device=self.device)

    def _rows_of(self, slots: torch.Tensor | slice) -> torch.Tensor:
        if isinstance(slots, slice):
            return torch.arange(slots.start, slots.stop, device=self.device)
        return slots

    def _slots(self, row: _Rows) -> torch.Tensor | slice:
        """Pool rows of the item's new tokens; sets the row's segment."""
        page_tokens = self.config.page_tokens
        pages = row.reservation.pages
        context = row.item.position + row.item.tokens
        slots: torch.Tensor | slice
        whole: torch.Tensor | slice
        if row.reservation.run:
            base = pages[0] * page_tokens
            whole = slice(base, base + context)
            slots = slice(base + row.item.position, base + context)
        else:
            used = torch.tensor(pages[: -(-context // page_tokens)])
            every = (used[:, None] * page_tokens + torch.arange(page_tokens)).flatten()[:context]
            whole = every.to(self.device)
            slots = whole[row.item.position :]
        row.segment = Segment(first=0, last=0, context_tokens=context, slots=whole)
        return slots

    def _run_layers(
        self,
        start: int,
        end: int,
        active: list[_Rows],
        total: int,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor | slice,
    ) -> torch.Tensor:
        """Layers ``[start, end)`` over the active rows; the others pass unchanged."""
        at = 0
        for row in active:
            row.segment.first, row.segment.last = at, at + row.last - row.first
            at = row.segment.last
        segments = [row.segment for row in active]
        if at == total:
            step = Step(pools=self._pools, write_slots=slots, segments=segments)
            return self._through(start, end, step, hidden, positions)
        chosen = _joined([self._rows_of(slice(row.first, row.last)) for row in active])
        step = Step(pools=self._pools, write_slots=self._rows_of(slots)[chosen], segments=segments)
        merged = hidden.clone()
        merged[chosen] = self._through(start, end, step, hidden[chosen], positions[chosen])
        return merged

    def _through(
        self, start: int, end: int, step: Step, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """``hidden`` of shape ``[tokens, hidden]`` behind layers ``[start, end)``."""
        packed, position_ids = hidden[None], positions[None]
        set_step(step)
        try:
            rotary = self._range.rotary(packed, position_ids)
            for index in range(start, end):
                out = self._range.layers[index](
                    packed,
                    attention_mask=None,
                    position_ids=position_ids,
                    past_key_values=None,
                    use_cache=False,
                    position_embeddings=rotary,
                )
                packed = out[0] if isinstance(out, tuple) else out
        finally:
            set_step(None)
        return packed[0]

    def _results(self, rows: list[_Rows], hidden: torch.Tensor) -> list[WorkResult]:
        """Tokens for the rows that are sampled, hidden states for those that go on."""
        sampled = self._sampled([row for row in rows if row.item.sampling is not None], hidden)
        goes_on = self.spec.layers
        results = []
        for row in rows:
            token_id, score = sampled.get(row.index, (None, b""))
            results.append(
                WorkResult(
                    item=row.item,
                    hidden=hidden[row.first : row.last] if row.item.end < goes_on else None,
                    token_id=token_id,
                    score=score,
                    prompt_scores=self._prompt_scores(row, hidden),
                )
            )
        return results

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[rows, vocab]`` of some rows behind the last layer."""
        if self._range.norm is None or self._range.head is None:
            raise RuntimeError("logits asked of a stage that does not hold the head")
        logits: torch.Tensor = self._range.head(self._range.norm(hidden))
        return logits

    def _sampled(self, rows: list[_Rows], hidden: torch.Tensor) -> dict[int, tuple[int, bytes]]:
        """By item: the token behind its last row, and that token's packed score where asked."""
        if not rows or self._range.head is None:
            return {}
        logits = self._logits(hidden[torch.tensor([r.last - 1 for r in rows], device=self.device)])
        draws = [
            Draw(
                sampling=row.item.sampling,
                position=row.item.position + row.item.tokens,
                history=row.item.history,
            )
            for row in rows
            if row.item.sampling is not None
        ]
        token_ids = draw_rows(logits, draws)
        scores = [b""] * len(rows)
        for top in {draw.sampling.logprobs for draw in draws} - {None}:
            asked = [at for at, draw in enumerate(draws) if draw.sampling.logprobs == top]
            packed = score_rows(logits[asked], [token_ids[at] for at in asked], top or 0)
            for at, score in zip(asked, packed, strict=True):
                scores[at] = score
        return {
            row.index: (token_id, score)
            for row, token_id, score in zip(rows, token_ids, scores, strict=True)
        }

    def _prompt_scores(self, row: _Rows, hidden: torch.Tensor) -> bytes:
        targets = row.item.targets
        if targets is None or self._range.head is None:
            return b""
        first = row.first + targets.first_row
        rows = hidden[first : first + len(targets.token_ids)]
        return score_prompt(self._logits, rows, targets.token_ids, targets.top, self.spec.vocab)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
