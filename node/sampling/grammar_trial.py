"""Tries a stranger's grammar where it can do no harm: a process of its own that reads one grammar.

llguidance bounds most of the work of reading a grammar, but some expressions multiply before any
bound counts, and rules that call each other a thousand deep end the process.
So a grammar is read and followed for some random bytes here, with a stack smaller than any thread
has and little time, before a peer reads it.
"""

import contextlib
import random
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

TRIAL_CPU_S = 2
TRIAL_MEMORY_BYTES = 1 << 30
TRIAL_STACK_BYTES = 512 << 10
TRIAL_STEPS = 128


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


class _Bytes:
    """A tokenizer whose tokens are the bytes, and an end."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes((value,)) for value in range(256)), b"<|end|>")
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def fault_of(grammar: str) -> str:
    """Why ``grammar`` cannot be followed, or an empty text. May not return at all."""
    matcher = LLMatcher(
        LLTokenizer(TokenizerWrapper(_Bytes())), grammar, log_level=0, limits=limits()
    )
    chance = random.Random(0)  # noqa: S311  which bytes are tried is no secret
    for _ in range(TRIAL_STEPS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token_id for token_id in range(256) if mask >> token_id & 1]
        if not allowed:
            break
        matcher.consume_token(chance.choice(allowed))
    return str(matcher.get_error()) if matcher.is_error() else ""


def _bound_this_process() -> None:
    with contextlib.suppress(ImportError):  # Windows: the parent's clock alone
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_CPU_S, TRIAL_CPU_S))
        resource.setrlimit(resource.RLIMIT_AS, (TRIAL_MEMORY_BYTES, TRIAL_MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Print the fault of the grammar on the standard input, after a line that says it was read."""
    grammar = sys.stdin.buffer.read().decode()
    _bound_this_process()
    threading.stack_size(TRIAL_STACK_BYTES)
    thread = threading.Thread(target=lambda: print("read\n" + fault_of(grammar), flush=True))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
