"""A log says what is new, once."""

import io
import logging
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.process.news import AGAIN_S, News
from dht.process.terminal import StderrHandler
from node.join import _told
from node.owner.reporter import Reporter


def test_what_stands_is_told_once_and_when_it_changes() -> None:
    news = News()
    looks = [(news.takes("a", float(s)), news.takes("a", s + 0.5)) for s in range(800)]
    assert looks == [(True, False), *[(False, False)] * 799]
    assert news.takes("b", 800.0)
    news.forget()
    assert news.takes("b", 801.0), "it was over meanwhile"


@given(texts=st.lists(st.sampled_from("abc"), max_size=300), gap_s=st.floats(0.1, 5.0))
def test_states_that_alternate_fill_no_log(texts: list[str], gap_s: float) -> None:
    news, told = News(), list[tuple[str, float]]()
    for at, text in enumerate(texts):
        if news.takes(text, at * gap_s):
            told.append((text, at * gap_s))
    for text in "abc":
        when_s = [at_s for each, at_s in told if each == text]
        assert all(b - a > AGAIN_S - 1e-6 for a, b in pairwise(when_s))


@pytest.mark.parametrize("peers", [(2,), (2, 3)])
def test_a_join_that_waits_writes_one_line(peers: tuple[int, ...]) -> None:
    out, log = io.StringIO(), io.StringIO()
    reporter = Reporter(json_log=False, out=out, log=log)
    for second in range(600):
        _told(reporter, "no_plan", reason="8 layers lack room", peers=peers[second % len(peers)])
    assert out.getvalue() == "No plan for all layers now: 8 layers lack room. Waiting for that.\n"
    _told(reporter, "no_plan", reason="2 layers lack room", peers=4)
    assert out.getvalue().count("\n") == 2


@pytest.mark.parametrize("level", ["WARNING", "WARN"])
def test_a_warning_that_repeats_is_written_once(
    monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    stderr, now_s = io.StringIO(), [0.0]
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr("dht.process.terminal.time.monotonic", lambda: now_s[0])
    log, handler = logging.getLogger("test.news"), StderrHandler()
    monkeypatch.setitem(logging._levelToName, logging.WARNING, level)  # hivemind renames it
    log.propagate = False
    log.setLevel(logging.WARNING)  # whatever commands that ran before set for all
    log.addHandler(handler)
    try:
        for second in range(int(AGAIN_S) + 1):
            now_s[0] = float(second)
            log.warning("cannot reach %s", "oak")
            log.warning("the plan stays as it is") if second % 2 else None
    finally:
        log.removeHandler(handler)
    assert stderr.getvalue().splitlines() == [
        "WARNING test.news: cannot reach oak",
        "WARNING test.news: the plan stays as it is",
        "WARNING test.news: cannot reach oak (599 times more)",
    ]
