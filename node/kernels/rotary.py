"""Rotates queries and keys in one launch, in models whose code does it by the usual function.

The function is recognised by what it computes: a modelling file's ``apply_rotary_pos_emb`` is tried
on random queries and keys, and replaced if the kernel gives the same. What the kernel does not
take, other devices and dtypes among it, still goes to the model's own function.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from node.kernels.trial import ERROR_MAX, SEED, TRIAL_TOKENS, TRIAL_WIDTH, alike, given_by, tried

NAME = "apply_rotary_pos_emb"
ON = "cuda"
"""Type of the devices on which the kernel runs."""

Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Interface of :func:`node.kernels.triton.rotary.rotate_heads`."""


class FusedRotation:
    """Takes the place of a modelling file's function."""

    def __init__(self, theirs: Callable[..., Any], rotate: Rotate) -> None:
        self._theirs, self._rotate = theirs, rotate
        self._shares: set[int] = set()
        """Widths of a head over widths of its cosines, as far as the kernel was seen to be right;
        0 until then."""

    def tried(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the kernel computes what the function does."""
        for share in (1, 2):
            if tried(
                device, "rotations run by torch", partial(self._is_alike, share, dtype, device)
            ):
                self._shares.add(share)
        return bool(self._shares)

    def _is_alike(self, share: int, dtype: torch.dtype, device: torch.device) -> bool:
        generator = torch.Generator().manual_seed(SEED)

        def drawn(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(device, dtype)

        query, key = (drawn(1, TRIAL_TOKENS, n, TRIAL_WIDTH).transpose(1, 2) for n in (6, 2))
        cos, sin = (drawn(1, TRIAL_TOKENS, TRIAL_WIDTH // share) for _ in range(2))
        wanted = given_by(self._theirs, query, key, cos, sin)
        if not isinstance(wanted, tuple) or len(wanted) != 2:
            return False
        with torch.inference_mode():
            given = self._rotate(query, key, cos, sin)
            return all(alike(*pair, ERROR_MAX) for pair in zip(given, wanted, strict=True))

    def __call__(self, query: Any, key: Any, *others: Any, **named: Any) -> Any:
        if len(others) == 2 and not named and self._takes(query, key, *others):
            return self._rotate(query, key, *others)
        return self._theirs(query, key, *others, **named)

    def _takes(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
        width = query.shape[-1]
        return (
            query.device.type == ON
            and query.dtype is key.dtype
            and query.dtype in (torch.bfloat16, torch.float16)
            and (query.dim(), key.dim(), cos.dim()) == (4, 4, 3)
            and query.shape[0] == key.shape[0] == cos.shape[0] == 1
            and query.shape[2] == key.shape[2] == cos.shape[1]
            and key.shape[3] == width
            and cos.shape == sin.shape
            and any(cos.shape[2] * share == width for share in self._shares)
        )


def fuse_rotation(
    layer: nn.Module, dtype: torch.dtype, device: torch.device, rotate: Rotate
) -> int:
    """Let ``rotate`` take the place of the function in the modelling files of the modules within
    ``layer``, where it computes the same; returns the number of files."""
    fused = 0
    for name in {type(module).__module__ for module in layer.modules()}:
        namespace = vars(sys.modules[name])
        theirs = namespace.get(NAME)
        if theirs is None or isinstance(theirs, FusedRotation):
            continue
        made = FusedRotation(theirs, rotate)
        if made.tried(dtype, device):
            namespace[NAME] = made
            fused += 1
    return fused
