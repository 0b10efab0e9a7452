"""Reads grammars of answers: tried apart, read in a thread, kept by hash, followed per session."""

import asyncio
import hashlib
import sys
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dht.messages.session import RefusalCode, Sampling
from node.sampling.grammar import GrammarError, GrammarState

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

READ_AT_ONCE_MAX = 2
WAITING_PER_CLIENT_MAX = 8
KEPT_MAX = 64
TRIAL_S = 10.0
"""Time for a trial on a busy machine; its processor time is bounded where a system can."""
TRIAL_COMMAND = (sys.executable, "-m", "node.sampling.grammar_trial")


class Grammars:
    """Grammars over one model's vocabulary. Used on the event loop; what takes long is not."""

    def __init__(self, directory: Path, vocab: int, config: Mapping[str, Any]) -> None:
        """``directory`` has the model's ``tokenizer.json``, or grammars are refused; ``config`` is
        the model's."""
        self._path = directory / "tokenizer.json"
        self._vocab = vocab
        self._eos = _eos_of(config)
        self._tokenizer: asyncio.Task[LLTokenizer] | None = None
        self._kept: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._reading: dict[bytes, asyncio.Lock] = {}
        self._slots = asyncio.Semaphore(READ_AT_ONCE_MAX)
        self._waiting: Counter[str] = Counter()

    async def state(self, client: str, sampling: Sampling, answer: Sequence[int]) -> GrammarState:
        """Where ``sampling``'s grammar stands after ``answer``; raises GrammarError."""
        matcher = (await self._matcher(client, sampling.grammar)).deep_copy()
        state = GrammarState(matcher, sampling.stop_token_ids)

        def follow() -> None:
            for token_id in answer:
                state.add(token_id)

        if answer:
            await asyncio.to_thread(follow)
        return state

    async def _matcher(self, client: str, grammar: bytes) -> "LLMatcher":
        key = hashlib.sha256(grammar).digest()
        if (known := self._known(key)) is not None:
            return known
        async with self._turn(client, key):
            if (known := self._known(key)) is not None:  # another session's, meanwhile
                return known
            found = self._kept[key] = await self._read(grammar)
            if len(self._kept) > KEPT_MAX:
                self._kept.popitem(last=False)
            return found

    def _known(self, key: bytes) -> "LLMatcher | None":
        if (found := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
        return found

    @asynccontextmanager
    async def _turn(self, client: str, key: bytes) -> AsyncIterator[None]:
        """One reading of a grammar at a time, few of all; raises GrammarError for a full queue."""
        if self._waiting[client] >= WAITING_PER_CLIENT_MAX:
            reason = f"{WAITING_PER_CLIENT_MAX} of your grammars are being read here"
            raise GrammarError(RefusalCode.TOO_MANY, reason)
        self._waiting[client] += 1
        lock = self._reading.setdefault(key, asyncio.Lock())
        try:
            async with lock, self._slots:
                yield
        finally:
            self._waiting[client] -= 1
            if not self._waiting[client]:
                del self._waiting[client]
            if not lock.locked():
                self._reading.pop(key, None)

    async def _read(self, grammar: bytes) -> "LLMatcher":
        try:
            text = grammar.decode()
        except UnicodeDecodeError:
            raise GrammarError(RefusalCode.BAD_REQUEST, "the grammar is not UTF-8") from None
        tokenizer = await self._ready_tokenizer()
        await self._try(grammar)

        def read() -> "LLMatcher":
            from llguidance import LLMatcher

            from node.sampling.grammar_trial import limits

            return LLMatcher(tokenizer, text, log_level=0, limits=limits())

        matcher = await asyncio.to_thread(read)
        if matcher.is_error():
            raise GrammarError(RefusalCode.BAD_REQUEST, f"the grammar: {matcher.get_error()}")
        return matcher

    async def _try(self, grammar: bytes) -> None:
        """Read the grammar in a process of its own first; raises GrammarError."""
        try:
            process = await asyncio.create_subprocess_exec(
                *TRIAL_COMMAND,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
        except OSError as error:
            raise GrammarError(RefusalCode.NOT_HELD, f"no grammar is tried here: {error}") from None
        try:
            said, _ = await asyncio.wait_for(process.communicate(grammar), TRIAL_S)
        except TimeoutError:
            said = b""
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        read, _, fault = said.decode(errors="replace").partition("\n")
        if read.strip() != "read":
            fault = "it takes too much time or memory to read, or nests too deep"
        if fault := fault.strip():
            raise GrammarError(RefusalCode.BAD_REQUEST, f"the grammar: {fault}")

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
