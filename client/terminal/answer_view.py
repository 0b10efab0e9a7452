"""Shows an answer at the end of a terminal while it grows, and one line below it.

Lines that will not change are printed for good; the newest few are drawn again with each piece, as
Markdown decides late what a line is. The line below says what happens now and leaves no trace.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, Segments
from rich.text import Text

REDRAW_S = 0.05
REDRAWN_LINES_MAX = 6
"""Maximum lines of the answer that are drawn again."""
FENCE = re.compile(r"^ {0,3}(```|~~~)", re.MULTILINE)
BLOCK_END = re.compile(r"\n[ \t]*\n(?=\S)")
"""An empty line before one that is not indented: what stands above is a block of its own."""


class AnswerView:
    """One answer on a terminal; made by :func:`answer_view`."""

    def __init__(self, console: Console, live: Live, *, markdown: bool) -> None:
        self._console = console
        self._live = live
        self._markdown = markdown
        self._open = ""
        """Text of the block that still grows."""
        self._printed = 0
        """Lines of that block that were printed for good."""
        self._note = ""
        self._drawn_s = 0.0

    def write(self, text: str) -> None:
        """Add text, which must be printable, and take the note away."""
        self._open += text
        while (cut := block_end(self._open, markdown=self._markdown)) is not None:
            block, self._open = self._open[: cut.start()], self._open[cut.end() :]
            self._print(self._lines(block)[self._printed :])
            if self._markdown == bool(block.strip()):  # else it has no line, or a blank one
                self._console.print()
            self._printed = 0
        self._note = ""
        if time.monotonic() - self._drawn_s >= REDRAW_S:
            self._draw()

    def note(self, text: str) -> None:
        """Show a line below the answer; an empty one takes it away."""
        if text != self._note:
            self._note = text
            self._draw()

    def close(self) -> None:
        """Print the rest; nothing is drawn again from here on."""
        rest = self._lines(self._open)[self._printed :]
        self._live.update(Text(""), refresh=True)
        self._print(rest)

    def _draw(self) -> None:
        lines = self._lines(self._open)
        room = max(1, min(REDRAWN_LINES_MAX, self._console.height - 3))
        upto = max(self._printed, len(lines) - room)
        self._print(lines[self._printed : upto])
        self._printed = upto
        shown: list[RenderableType] = [_segments(lines[upto:])] if lines[upto:] else []
        if self._note:
            note = Text(self._note, style="dim", no_wrap=True, overflow="ellipsis")
            shown.append(note)
        self._live.update(Group(*shown), refresh=True)
        self._drawn_s = time.monotonic()

    def _lines(self, text: str) -> list[list[Segment]]:
        if not text.strip():
            return []
        shown: RenderableType = Text(text.rstrip("\n"), overflow="fold")
        if self._markdown:
            shown = Markdown(text, code_theme="ansi_dark", hyperlinks=False)
        return self._console.render_lines(shown, pad=False)

    def _print(self, lines: list[list[Segment]]) -> None:
        if lines:
            self._console.print(_segments(lines), end="")


def block_end(text: str, *, markdown: bool) -> "re.Match[str] | None":
    """Where the first block of ``text`` ends, if it does: a line of plain text, or in Markdown what
    an empty line outside fenced code follows."""
    if not markdown:
        return re.search(r"\n", text)
    for found in BLOCK_END.finditer(text):
        if len(FENCE.findall(text[: found.start()])) % 2 == 0:
            return found
    return None


def _segments(lines: list[list[Segment]]) -> Segments:
    return Segments([part for line in lines for part in (*line, Segment.line())])


@contextmanager
def answer_view(console: Console, *, markdown: bool) -> Iterator[AnswerView]:
    """A view at the end of ``console``, which must be a terminal. What was written stays there."""
    with Live(
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        vertical_overflow="crop",
    ) as live:
        view = AnswerView(console, live, markdown=markdown)
        try:
            yield view
        finally:
            view.close()
