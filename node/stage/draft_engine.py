"""A draft model of a first stage: whole, small, on the stage's device, in a thread of its own.

It runs on an engine like the stage's (:mod:`node.engine.engine`), with KV for few sessions, so that
what it takes is bounded, and neither steps of the stage nor the event loop wait for it.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dht.checkpoints.model_files import library_config, sizes_of
from dht.errors import MachineError, NetworkError, UserError
from dht.messages.session import SESSION_BOUNDS
from dht.process.json_file import read_object
from node.drafting.chain import DraftChain
from node.drafting.config import drafter_bytes
from node.engine.engine import Engine, EngineConfig
from node.engine.work_item import WorkItem
from node.model import lean_transformers
from node.model.layer_range import ModelLayout
from node.weights.store import WeightStore

logger = logging.getLogger(__name__)

DIRECTORY = "draft"
"""Where a draft model is found, within the model's directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftEngineConfig:
    """How much a draft model takes."""

    sessions_max: int = 8
    share_found: float = 0.25
    """Maximum share of the lent memory that a draft model takes which nobody has asked for."""


DRAFT_ENGINE = DraftEngineConfig()


def found_beside(model: str) -> str | None:
    """The draft model in a model's directory, if there is one."""
    directory = Path(model).expanduser() / DIRECTORY
    return str(directory) if (directory / "config.json").is_file() else None


def vocabulary(directory: Path) -> dict[str, int] | None:
    """Token ids by token of a model's ``tokenizer.json``; None without one. Raises UserError."""
    path = directory / "tokenizer.json"
    try:
        read = read_object(path)
        known = read["model"]["vocab"]
        if isinstance(known, list):  # of a unigram model: pairs of a token and its score
            known = {str(token): index for index, (token, _) in enumerate(known)}
        return {**known, **{each["content"]: each["id"] for each in read["added_tokens"]}}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no tokenizer: {error!r}") from None


class DraftEngine:
    """Implements :class:`node.drafting.chain.DraftRunner` over an engine."""

    def __init__(self, engine: Engine, vocab: int, *, held: bool = False) -> None:
        """``vocab``: tokens of the model for which this one drafts; ``held``: whether the weights
        are loaded."""
        self._engine = engine
        self._vocab = vocab
        self._layers = (0, engine.spec.layers)
        self._open: dict[str, int] = {}
        """The tokens that each session may have here: its own, or as many as this model reads."""
        self._held = held
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drafts")
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def prepared(
        cls,
        model: str,
        drafts: WeightStore,
        store: WeightStore,
        *,
        device: str,
        dtype: str,
        memory_bytes: int,
    ) -> "DraftEngine":
        """The draft model in ``drafts``, which was named ``model``, for the model in ``store``;
        without weights until :meth:`hold`.

        It takes :attr:`memory_bytes`, of ``memory_bytes`` at most. Raises UserError where it has
        other tokens, keeps a state that cannot be cut, or does not fit; NetworkError.
        """

        def build() -> tuple[Engine, int]:
            vocab = _shared_vocabulary(model, drafts.directory, store.directory)
            layout = ModelLayout.of(drafts, dtype, device=device)
            spec = layout.spec(model)
            if layout.state_tokens:
                raise UserError(f"--draft {model}: its layers keep a state, which cannot be cut")
            need_bytes = drafter_bytes(spec)
            if need_bytes >= memory_bytes:
                raise UserError(
                    f"--draft {model} takes {need_bytes / 2**30:.4f} GiB, of what is lent it may"
                    f" take {memory_bytes / 2**30:.4f}; lend more, or leave it out (--draft none)"
                )
            engine = Engine(
                EngineConfig(
                    store=drafts,
                    name=model,
                    device=device,
                    dtype=dtype,
                    memory_bytes=need_bytes,
                    keep_prefixes=False,
                    layout=layout,
                )
            )
            return engine, vocab

        return cls(*await asyncio.to_thread(build))

    async def hold(self, *, wanted: bool) -> None:
        """Load the weights, or free their memory; sessions must have ended.

        Where they cannot be loaded, nothing is drafted.
        """
        if wanted == self._held:
            return
        self._held = False
        try:
            work = self._load if wanted else self._engine.unload
            await self._loop.run_in_executor(self._thread, work)
        except (UserError, MachineError, NetworkError, RuntimeError, OSError):
            logger.exception("the draft model cannot be loaded")
        else:
            self._held = wanted

    def _load(self) -> None:
        self._engine.loaded.fetch(*self._layers)
        self._engine.load(*self._layers)

    @property
    def memory_bytes(self) -> int:
        """Memory for weights and KV."""
        return self._engine.config.memory_bytes

    def close(self) -> None:
        """End the thread after its running step."""
        self._thread.shutdown(cancel_futures=True)

    def open(self, key: str, tokens: int) -> bool:
        """Let a session draw; see :class:`node.drafting.chain.DraftRunner`."""
        if not self._held or len(self._open) >= DRAFT_ENGINE.sessions_max:
            return False
        most = min(
            tokens + 2 * SESSION_BOUNDS.draft_tokens_max + 1, self._engine.spec.context_tokens
        )
        self._engine.kv.open(key, most, self._layers)
        self._open[key] = most
        return True

    def free(self, key: str) -> None:
        self._open.pop(key, None)
        self._engine.kv.free(key)

    def draw(self, chain: DraftChain, told: Callable[[], None]) -> None:
        """Go on with a chain, behind those that came before it."""
        self._thread.submit(self._draw, chain, told, time.perf_counter())

    def _draw(self, chain: DraftChain, told: Callable[[], None], since_s: float) -> None:
        try:
            while chain.goes_on:
                self._step(chain)
                now_s = time.perf_counter()
                chain.spent_s, since_s = chain.spent_s + now_s - since_s, now_s
                if len(chain.drawn) == chain.wakes_at:
                    self._tell(told)
        except Exception:  # whatever a draft model does, answers go on without it
            logger.exception("the draft model failed")
            chain.failed = True

        def ended() -> None:
            chain.running = False
            told()

        self._tell(ended)

    def _tell(self, told: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(told)
        except RuntimeError:
            logger.debug("the event loop ended before a draft was handed over")

    def _step(self, chain: DraftChain) -> None:
        """Run the chain's next rows, and draw a token behind the last one."""
        token_ids, draws = chain.rows()
        end = chain.ran + len(token_ids)
        is_beyond = end > self._open.get(chain.key, 0)
        if is_beyond or not self._engine.kv.extend(chain.key, end):
            chain.failed = True
            return
        item = WorkItem(
            session=chain.key,
            start=self._layers[0],
            end=self._layers[1],
            position=chain.ran,
            token_ids=token_ids,
            sampling=chain.sampling if draws else None,
        )
        (result,) = self._engine.step([item])
        token_id = result.token_id
        if result.error is not None or (draws and not 0 <= (token_id or 0) < self._vocab):
            logger.debug("a session is drafted no more: %s", result.error)
            chain.failed = True
            return
        chain.ran = end
        if token_id is not None:
            chain.drawn.append(token_id)


def _shared_vocabulary(model: str, own: Path, theirs: Path) -> int:
    """Number of tokens of the model in the directory ``theirs``; raises UserError if the draft
    model ``model``, in ``own``, has other tokens."""
    other = UserError(
        f"--draft {model} has another vocabulary than the model, so its drafts would mean nothing:"
        " give one with the same tokens, or none"
    )
    tokens = [vocabulary(each) for each in (own, theirs)]
    if None not in tokens and tokens[0] != tokens[1]:
        raise other
    lean_transformers.prepare_transformers()  # after what needs no transformers
    sizes = [sizes_of(library_config(each))[2] for each in (own, theirs)]
    if None in tokens and sizes[0] != sizes[1]:
        raise other
    return sizes[1]
