"""For all tests: the same generated examples in every run, however long a busy machine takes."""

import os

import pytest
import torch
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests.examples import USUAL

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


# Our kernels run on the CPU, interpreted, where there is no GPU: said before Triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
