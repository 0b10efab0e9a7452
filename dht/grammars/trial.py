"""Tries a stranger's grammar where it can do no harm: a process of its own that reads one grammar.

llguidance bounds most of the work of reading a grammar, but some expressions multiply before any
bound counts, and rules that call each other a thousand deep end the process.
So a grammar is read and followed for some random bytes here, with a stack smaller than any thread
has and little time, before a peer reads it. Importing llguidance takes ten times as long as reading
most grammars, so one process imports it and is copied for each trial, where the system can do that.
"""

import contextlib
import math
import os
import random
import re
import socket
import sys
import threading
from dataclasses import dataclass
from typing import BinaryIO, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialConfig:
    memory_bytes: int = 1 << 30
    stack_bytes: int = 512 << 10
    steps: int = 128
    """Number of tokens that are tried."""
    niceness: int = 5
    """A third of a core against one that works, so that trials give way to a peer's own work. At 10
    a common grammar's ten milliseconds took seconds where ten programs were at work."""
    request_bytes_max: int = 64


CONFIG = TrialConfig()


def limits() -> LLParserLimits:
    """Bounds on the work that a grammar causes when it is read and at each token."""
    return LLParserLimits(
        max_items_in_row=1_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=10_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


_IDS = re.compile(r"<\[[0-9,\s-]{1,4096}\]>")


def _renumbered(grammar: str) -> tuple[str, int]:
    """The same grammar with the token ids that it names made small, in their order, and how many
    there are: a vocabulary of the model's size takes longer to set up than most grammars."""
    found = {number for each in _IDS.findall(grammar) for number in re.findall(r"[0-9]+", each)}
    ids = sorted({int(number) for number in found if len(number) < 10})
    small = {number: 257 + at for at, number in enumerate(ids)}

    def renumber(number: "re.Match[str]") -> str:
        return str(small[int(number[0])]) if len(number[0]) < 10 else number[0]

    return _IDS.sub(lambda each: re.sub(r"[0-9]+", renumber, each[0]), grammar), len(ids)


class _Bytes:
    """A tokenizer whose tokens are the bytes, an end, and some without a text."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)

    def __init__(self, more: int) -> None:
        self.tokens = (*(bytes((value,)) for value in range(256)), b"<|end|>", *(b"",) * more)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def fault_of(grammar: str) -> str:
    """Why ``grammar`` cannot be followed, or an empty text. May not return at all."""
    grammar, more = _renumbered(grammar)
    matcher = LLMatcher(
        LLTokenizer(TokenizerWrapper(_Bytes(more))), grammar, log_level=0, limits=limits()
    )
    chance = random.Random(0)  # noqa: S311  which bytes are tried is no secret
    for _ in range(CONFIG.steps):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token_id for token_id in range(256) if mask >> token_id & 1]
        if not allowed and mask >> 257:  # a token that is named
            allowed = [257 + ((mask >> 257) & -(mask >> 257)).bit_length() - 1]
        if not allowed:
            break
        matcher.consume_token(chance.choice(allowed))
    return str(matcher.get_error()) if matcher.is_error() else ""


def _bound_this_process(cpu_s: float) -> None:
    with contextlib.suppress(AttributeError, OSError):  # Windows: the parent's clock alone
        os.nice(CONFIG.niceness)
    with contextlib.suppress(ImportError):
        import resource
        import signal

        whole_s = math.ceil(cpu_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (whole_s, whole_s))
        resource.setrlimit(resource.RLIMIT_AS, (CONFIG.memory_bytes, CONFIG.memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # ends the process: nothing catches SIGPROF


def _try(given: BinaryIO, told: BinaryIO, length: int, cpu_s: float) -> None:
    """Tell the fault of the grammar of ``length`` bytes that is given, behind a line that says that
    it was read."""
    grammar = given.read(length)
    if len(grammar) < length:  # whoever asked is gone
        return
    _bound_this_process(cpu_s)
    threading.stack_size(CONFIG.stack_bytes)

    def tell() -> None:
        told.write(b"read\n" + fault_of(grammar.decode()).encode())
        told.flush()

    thread = threading.Thread(target=tell)
    thread.start()
    thread.join()


def _copy_for_each(requests: socket.socket) -> None:
    """Start a copy of this process for each request, until there are no more.

    A request has the length of a grammar and seconds of processor time, as text, and a socket over
    which the copy says its process id, reads the grammar, and tells its fault.
    """
    import signal

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # copies that end leave nothing behind
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, CONFIG.request_bytes_max, 1)
        if not request:
            return
        if os.fork() == 0:
            try:
                requests.close()
                length, cpu_s = request.split()
                with socket.socket(fileno=descriptors[0]) as its, its.makefile("rwb") as file:
                    file.write(b"%d\n" % os.getpid())
                    file.flush()
                    _try(cast("BinaryIO", file), cast("BinaryIO", file), int(length), float(cpu_s))
            finally:
                os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def main() -> None:
    """Serve requests that come over the standard input, a socket; with arguments, try one grammar.

    These are its length and the seconds of processor time that it may take; it comes on the
    standard input.
    """
    if len(sys.argv) > 1:
        _try(sys.stdin.buffer, sys.stdout.buffer, int(sys.argv[1]), float(sys.argv[2]))
    else:
        with socket.socket(fileno=os.dup(sys.stdin.fileno())) as requests:
            # No copy may keep it open: who asks would not see that the process that copies ended.
            with open(os.devnull) as nothing:
                os.dup2(nothing.fileno(), sys.stdin.fileno())
            _copy_for_each(requests)


if __name__ == "__main__":
    main()
