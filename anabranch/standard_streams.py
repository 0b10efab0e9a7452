"""What a command reads and writes: its standard streams, however it was started."""

import io
import os
import sys


def prepare_streams() -> None:
    """Let writing to stdout and stderr fail for no reason of the one who started this process.

    A stream that was closed (``>&-``, as some services do) is that of ``/dev/null``: else its
    number goes to the next file or socket, and the event loop ends the process. A character that
    the terminal or file has none for becomes a question mark: not every system writes UTF-8.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # in this order: the lowest free number is taken
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  until the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
