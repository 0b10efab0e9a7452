"""Reads grammars of answers: tried apart, read in a thread, kept by hash, followed per session."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dht.grammars.trials import GrammarTrials, Lane, TrialsBusyError
from dht.messages.session import RefusalCode, Sampling
from dht.process.newest import Newest
from node.sampling.grammar import GrammarError, GrammarState

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarsConfig:
    """How many grammars and clients are remembered, and how many are read at once."""

    kept_max: int = 64
    worked_tokens: int = 16
    """Tokens of answers under a grammar after which a client goes before those who only had a
    grammar read here: they cost it work."""
    worked_max: int = 4096
    """Clients whose work is counted; the one without any for longest is forgotten first."""
    reads_at_once: int = 3
    """Turns of grammars that passed their trial, which are read in threads of this process: reading
    one takes no longer than its trial did."""


GRAMMARS = GrammarsConfig()


class Grammars:
    """Grammars over one model's vocabulary. Used on the event loop; what takes long is not."""

    def __init__(
        self,
        directory: Path,
        vocab: int,
        config: Mapping[str, Any],
        trials: GrammarTrials | None = None,
    ) -> None:
        """``directory`` has the model's ``tokenizer.json``, or grammars are refused; ``config`` is
        the model's."""
        self._path = directory / "tokenizer.json"
        self._vocab = vocab
        self._eos = _eos_of(config)
        self._tokenizer: asyncio.Task[LLTokenizer] | None = None
        self._kept: Newest[bytes, LLMatcher] = Newest(GRAMMARS.kept_max)
        self._trials = trials or GrammarTrials()
        self._reader = ThreadPoolExecutor(GRAMMARS.reads_at_once, "grammars")
        self._reads = Lane(GRAMMARS.reads_at_once, work_s=0.3, queued_s_max=2.0)
        self._worked: OrderedDict[str, int] = OrderedDict()
        """Tokens of answers under a grammar by client."""

    async def state(self, client: str, sampling: Sampling, answer: Sequence[int]) -> GrammarState:
        """Where ``sampling``'s grammar stands after ``answer``; raises GrammarError."""
        matcher = (await self._matcher(client, sampling.grammar)).deep_copy()

        def follow() -> GrammarState:
            state = GrammarState(matcher, sampling.stop_token_ids)
            for token_id in answer:
                state.add(token_id)
            return state

        state = await self._in_turn(client, follow) if answer else follow()
        state.on_token = lambda: self._work(client)
        return state

    def _work(self, client: str) -> None:
        """Count a token that was drawn; the engine's thread calls it."""
        self._worked[client] = self._worked.get(client, 0) + 1
        with suppress(KeyError):
            self._worked.move_to_end(client)
            if len(self._worked) > GRAMMARS.worked_max:
                self._worked.popitem(last=False)

    async def _matcher(self, client: str, grammar: bytes) -> "LLMatcher":
        key = hashlib.sha256(grammar).digest()
        if (found := self._kept.get(key)) is None:
            found = await self._read(client, grammar)
        self._kept[key] = found
        return found

    async def _read(self, client: str, grammar: bytes) -> "LLMatcher":
        try:
            text = grammar.decode()
        except UnicodeDecodeError:
            raise GrammarError(RefusalCode.BAD_REQUEST, "the grammar is not UTF-8") from None
        tokenizer = await self._ready_tokenizer()
        try:
            fault = await self._trials.fault(client, grammar, self._standing(client))
        except TrialsBusyError as error:
            raise GrammarError(RefusalCode.TOO_MANY, str(error)) from None
        if fault:
            raise GrammarError(RefusalCode.BAD_REQUEST, f"the grammar: {fault}")

        def read() -> "LLMatcher":
            from llguidance import LLMatcher

            from dht.grammars.trial import limits

            return LLMatcher(tokenizer, text, log_level=0, limits=limits())

        matcher = await self._in_turn(client, read)
        if matcher.is_error():
            raise GrammarError(RefusalCode.BAD_REQUEST, f"the grammar: {matcher.get_error()}")
        return matcher

    def _standing(self, client: str) -> int:
        return int(self._worked.get(client, 0) >= GRAMMARS.worked_tokens)

    async def _in_turn(self, client: str, work: Callable[[], T]) -> T:
        """What ``work()`` returns, in a thread, in the client's turn; raises GrammarError."""
        standing = self._standing(client) + self._trials.standing(client)
        try:
            async with self._reads.turn(client, standing):
                return await asyncio.get_running_loop().run_in_executor(self._reader, work)
        except TrialsBusyError as error:
            raise GrammarError(RefusalCode.TOO_MANY, str(error)) from None

    async def _ready_tokenizer(self) -> "LLTokenizer":
        if self._tokenizer is None:
            self._tokenizer = asyncio.create_task(asyncio.to_thread(self._load_tokenizer))
        return await asyncio.shield(self._tokenizer)

    def _load_tokenizer(self) -> "LLTokenizer":
        try:
            from llguidance import LLTokenizer

            text = self._path.read_text(encoding="utf-8")
            return LLTokenizer(text, n_vocab=self._vocab, eos_token=self._eos)
        except (ImportError, OSError, ValueError) as error:
            reason = f"this peer has no tokenizer for grammars: {error}"
            raise GrammarError(RefusalCode.NOT_HELD, reason) from None


def _eos_of(config: Mapping[str, Any]) -> int | list[int] | None:
    found = config.get("eos_token_id")
    if isinstance(found, int):
        return found
    return [each for each in found if isinstance(each, int)] if isinstance(found, list) else None
