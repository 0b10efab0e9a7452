"""For all tests: the same generated examples and sums in every run, on however busy a machine."""

import asyncio
import gc
import inspect
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from testing.clock import run_virtual
from tests.examples import USUAL

os.environ["ANABRANCH_MEMORY"] = ""  # tests neither read nor change what the user's commands keep
sys.dont_write_bytecode = False  # else each run, and each peer, compiles every module again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.pop("ANABRANCH_PEERS", None)

settings.register_profile(
    "same", max_examples=USUAL, deadline=None, derandomize=True, database=None
)
settings.register_profile("fuzz", max_examples=20 * USUAL, deadline=None, print_blob=True)
settings.load_profile("same")


@pytest.hookimpl(trylast=True)  # after --hypothesis-profile
def pytest_configure() -> None:
    """Draw no constants of ours where examples are to be the same.

    Hypothesis draws some from the modules that happen to be loaded: by the tests before.
    """
    if settings.default.derandomize:
        nothing = providers._local_constants
        providers._get_local_constants = lambda: nothing


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage meanwhile: nearly all that is imported stays."""
    gc.disable()
    yield
    gc.enable()


def pytest_collection_finish() -> None:
    """What is imported by now stays: no search for garbage need walk through all of it."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup() -> None:
    """Every test draws the same numbers, whichever ran before."""
    torch.manual_seed(0)
    random.seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine: on a virtual clock where its mark says so, else on a loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    running = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    mark = pyfuncitem.get_closest_marker("virtual")
    if mark is None:
        asyncio.run(running)
    else:
        run_virtual(running, **mark.kwargs)
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share the suite out by files, in their order, unless ``--dist`` says how to."""
    if config.getoption("dist") != "load":
        return None
    from tests.workers import ProcessesBesideFiles

    config.option.loadscopereorder = False
    return ProcessesBesideFiles(config, log)


torch.set_num_threads(1)  # sums in one order, and as many threads as there are workers
# Our kernels run on the CPU, interpreted, where there is no GPU: said before Triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
