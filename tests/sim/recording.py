"""A plugin of pytest that writes what happens in every test's simulations, a file for each test.

``--record-to DIR`` runs some of each file's tests alone, the first case of each: a seed or setting.
With ``--disturbed`` rubbish is never collected, and others have the processors first: nothing may
hang on when either happens.
"""

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.simulator.core.clock import recorded

EACH = 3
"""Every third test of a file is run: those of one file run much the same simulation."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-to", type=Path)
    parser.addoption("--disturbed", action="store_true")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("disturbed"):
        gc.disable()
        if hasattr(os, "nice"):
            os.nice(10)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    firsts: dict[str, pytest.Item] = {}
    for item in items:
        firsts.setdefault(_function(item), item)
    by_file: dict[str, list[pytest.Item]] = {}
    for item in firsts.values():
        by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
    items[:] = [item for tests in by_file.values() for item in tests[::EACH]]


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    name = re.sub(r"\W+", "-", item.nodeid)
    with (
        (item.config.getoption("record_to") / f"{name}.log").open("w") as log,
        recorded(lambda line: print(line, file=log)),
    ):
        yield
