"""Lets functions of ours take the place of methods of single modules.

The module's class becomes a subclass of its own. Names and attributes stay, other modules of the
class keep their code, and no cycle of references keeps weights on a device that nobody holds.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ON = "cuda"
"""Type of the devices on which kernels run."""
_NAME = "_method_of_ours"


def takes(tensor: Any, dtype: torch.dtype) -> bool:
    """Whether a kernel that was tried in ``dtype`` takes this tensor."""
    return isinstance(tensor, Tensor) and tensor.device.type == ON and tensor.dtype is dtype


def replace_method(module: nn.Module, name: str, ours: Callable[..., Any]) -> None:
    """Let ``ours``, which is handed the module first, take the place of a method."""
    kind = type(module)
    own = {name: ours, _NAME: name, "__module__": kind.__module__, "__doc__": kind.__doc__}
    module.__class__ = type(kind.__name__, (kind,), own)


def replaced_method(module: nn.Module) -> str | None:
    """Name of the method of ``module`` that was replaced; None if none was."""
    name: str | None = getattr(type(module), _NAME, None)
    return name
