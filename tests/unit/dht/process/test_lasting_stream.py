"""What a process says ends it neither where nobody reads it any more nor where no disk takes it."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

import pytest

from dht.process.lasting_stream import LastingStream
from node.owner.reporter import Reporter

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pipes and devices of POSIX")


def _broken() -> TextIO:
    """A pipe whose reader has gone."""
    reads, writes = os.pipe()
    os.close(reads)
    return os.fdopen(writes, "w")


def _hung_up() -> TextIO:
    """A terminal whose other side is closed."""
    ours, theirs = os.openpty()
    os.close(ours)
    return io.TextIOWrapper(io.FileIO(theirs, "w"), write_through=True)


def _full() -> TextIO:
    """A file on a full disk."""
    return open("/dev/full", "w")


@pytest.fixture(params=[_broken, _hung_up, _full])
def stream(request: pytest.FixtureRequest) -> Iterator[TextIO]:
    made: TextIO = request.param()
    yield made
    with suppress(OSError):
        made.close()


def test_what_cannot_be_written_is_left_out(stream: TextIO) -> None:
    lasting = LastingStream(stream)
    for _ in range(3):
        assert lasting.write("word " * 9999) == 5 * 9999
        lasting.flush()
    assert lasting.isatty() is stream.isatty()


@pytest.mark.parametrize("json_log", [False, True])
def test_a_peer_goes_on_without_who_reads_it(json_log: bool, stream: TextIO) -> None:
    reporter = Reporter(json_log=json_log, out=stream, log=stream)
    reporter.say("a line")
    reporter.event("serving")
    with reporter.phase("Loading", counted=True) as meter:
        meter(1, 2)
    reporter.paste("anabranch join")
    reporter.hide()


def test_where_the_reader_is_gone_nothing_is_left_for_the_end_of_the_process() -> None:
    stream = _broken()
    LastingStream(stream).write("a line")
    LastingStream(stream).flush()
    stream.write("another")
    stream.close()
