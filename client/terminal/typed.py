"""What a person types: with an editor where there is one, a history, and messages of many lines."""

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path

from dht.errors import UserError

HISTORY_LINES_MAX = 1000
PROMPT = "> "
MORE = "… "
MANY_LINES = '"""'
"""Begins and ends a message of many lines."""
EDITOR = (
    "set enable-bracketed-paste on",  # Python's readline turns it off
    '"\\e[A": history-search-backward',
    '"\\e[B": history-search-forward',
)
"""What is pasted comes whole; the arrows find lines that begin as typed, Ctrl-R those that hold
what is typed."""


def start_editor(history: Path | None) -> None:
    """Edit lines with readline if there is one, and keep them in the file ``history``."""
    import atexit

    try:
        import readline
    except ImportError:
        return
    for each in EDITOR:
        readline.parse_and_bind(each)
    if history is None:
        return
    try:
        path = history.expanduser()
    except RuntimeError:  # there is no home directory
        return
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES_MAX)

    def save() -> None:
        with suppress(OSError):
            readline.write_history_file(path)

    atexit.register(save)


async def read_message() -> str | None:
    """A line without its end, or what stands between two marks of :data:`MANY_LINES`; None at the
    end of input. The loop goes on meanwhile."""
    first = await _read_line(PROMPT)
    if first is None or not first.lstrip().startswith(MANY_LINES):
        return first
    lines = [first.lstrip().removeprefix(MANY_LINES)]
    while not lines[-1].rstrip().endswith(MANY_LINES):
        more = await _read_line(MORE)
        if more is None:
            break
        lines.append(more)
    lines[-1] = lines[-1].rstrip().removesuffix(MANY_LINES)
    return "\n".join(lines).strip("\n")


def prompt_again() -> None:
    """The prompt below a note, with what was typed so far: who reads the line knows of no note."""
    if sys.stdin.isatty():
        editor = sys.modules.get("readline")  # without it the terminal drops what was typed
        typed = editor.get_line_buffer() if editor is not None else ""
        print(f"{_coloured(PROMPT)}{typed}", end="", flush=True)


async def _read_line(prompt: str) -> str | None:
    prompt = _coloured(prompt, "\001", "\002") if sys.stdin.isatty() else ""
    try:
        return await asyncio.to_thread(input, prompt)
    except EOFError:
        if prompt:
            print(flush=True)  # what comes next begins its own line
        return None
    except UnicodeDecodeError:
        raise UserError("what was typed is not valid UTF-8 text") from None


def _coloured(prompt: str, begin: str = "", end: str = "") -> str:
    """The prompt in colour; ``begin`` and ``end`` tell the editor what takes no room."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return prompt
    if "readline" not in sys.modules:
        begin = end = ""
    return f"{begin}\033[1;36m{end}{prompt}{begin}\033[0m{end}"
