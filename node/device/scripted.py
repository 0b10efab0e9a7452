"""Functions compiled by TorchScript."""

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch

from dht.errors import first_line

logger = logging.getLogger(__name__)


@functools.cache
def scripted(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` compiled by TorchScript, or as it is if torch cannot compile it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            made: Callable[..., Any] = torch.jit.script(function)
    except (RuntimeError, AttributeError, OSError) as error:
        logger.warning("%s stays in Python: %s", function.__name__, first_line(error))
        return function
    return made
