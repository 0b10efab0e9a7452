"""Gates the inner numbers of feed-forward modules, ``activation(gate) · up``, in one launch.

What a module does between its products is recognised by what it computes: it is tried on random
rows in the place of the products, in float32, too, in which activations that are almost the same
differ. Dense modules call their own linear modules as before.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from node.kernels.methods import replace_method, replaced_method, takes
from node.kernels.trial import ERRORS_MAX, TRIAL_WIDTH, alike, drawn, given_by, tried

ALPHAS = ("alpha", "swiglu_alpha")
LIMITS = ("limit", "swiglu_limit")
"""Attribute names in models."""
APPLY_GATE = "_apply_gate"
"""Method of ``transformers``' mixtures that is handed the gate's and the up product as one."""
LINEARS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("gate_up_proj",), "down_proj"),
    (("input_linear",), "output_linear"),
)
"""Names of the linear modules of dense modules: before the gate, two or one for both; and behind
it."""
TRIAL_SCALES = (1.0, 30.0, 1e-2)

GateRows = Callable[[Tensor, Tensor, float, float, float, float], Tensor]
"""Interface of :func:`node.kernels.triton.gate.gate_rows`."""
Split = Callable[[Tensor], tuple[Tensor, Tensor]]


class Formula(NamedTuple):
    """``g · sigmoid(alpha · (g + cubic · g³)) · (u + shift)``, ``g`` and ``u`` being limited."""

    alpha: float
    cubic: float = 0.0
    limit: float = math.inf
    shift: float = 0.0


KNOWN = (
    Formula(1.0),  # SiLU
    Formula(math.sqrt(8 / math.pi), 0.044715),  # GELU by tanh
    Formula(1.702),  # GELU by sigmoid
)


def _halves(made: Tensor) -> tuple[Tensor, Tensor]:
    width = made.shape[-1] // 2
    return made[..., :width], made[..., width:]


def _in_turn(made: Tensor) -> tuple[Tensor, Tensor]:
    return made[..., ::2], made[..., 1::2]


def fuse_gates(layer: nn.Module, dtype: torch.dtype, device: torch.device, kernel: GateRows) -> int:
    """Let ``kernel`` gate in the mixtures and dense modules in ``layer``, which computes in
    ``dtype``, where it gives the same; returns their number."""
    fused = 0
    for module in layer.modules():
        if dtype not in ERRORS_MAX or replaced_method(module) is not None:
            continue
        if hasattr(module, APPLY_GATE):
            _fuse_mixtures_gate(module, dtype, device, kernel)
        else:
            _fuse_dense_gate(module, dtype, device, kernel)
        fused += replaced_method(module) is not None
    return fused


def _fuse_mixtures_gate(
    module: Any, dtype: torch.dtype, device: torch.device, kernel: GateRows
) -> None:
    apart = _recognised(module._apply_gate, module, (_halves, _in_turn), dtype, device, kernel)
    if apart is None:
        return
    split, formula = apart
    theirs = type(module)._apply_gate

    def apply_gate(self: Any, made: Tensor) -> Any:
        if takes(made, dtype) and made.numel() > 0:
            return kernel(*split(made), *formula)
        return theirs(self, made)

    replace_method(module, APPLY_GATE, apply_gate)


def _fuse_dense_gate(
    module: Any, dtype: torch.dtype, device: torch.device, kernel: GateRows
) -> None:
    children = {name for name, _ in module.named_children()}
    fitting = (names for names in LINEARS if children.issuperset((*names[0], names[1])))
    before, behind = next(fitting, ((), ""))
    if not before:
        return
    theirs = type(module).forward
    bare = _Bare(module, before, behind)
    splits = (_halves,) if len(before) == 2 else (_halves, _in_turn)
    apart = _recognised(partial(theirs, bare), module, splits, dtype, device, kernel)
    if apart is None:
        return
    split, formula = apart

    def forward(self: Any, hidden: Tensor) -> Any:
        if not takes(hidden, dtype) or hidden.numel() == 0:
            return theirs(self, hidden)
        made = [getattr(self, name)(hidden) for name in before]
        gate, up = made if len(made) == 2 else split(made[0])
        return getattr(self, behind)(kernel(gate, up, *formula))

    replace_method(module, "forward", forward)


class _Bare:
    """Stands in for a dense module whose products are handed to it as its input, ``[..., 2 ·
    width]``, and whose output is what its last linear module would be handed."""

    def __init__(self, module: nn.Module, before: Sequence[str], behind: str) -> None:
        self._module = module
        parts = (_same,) if len(before) == 1 else (_first, _second)
        vars(self).update(zip(before, parts, strict=True), **{behind: _same})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _same(made: Tensor) -> Tensor:
    return made


def _first(made: Tensor) -> Tensor:
    return _halves(made)[0]


def _second(made: Tensor) -> Tensor:
    return _halves(made)[1]


def _recognised(
    theirs: Callable[[Tensor], Any],
    module: Any,
    splits: tuple[Split, ...],
    dtype: torch.dtype,
    device: torch.device,
    kernel: GateRows,
) -> tuple[Split, Formula] | None:
    """How the products lie in what ``theirs`` is handed, and what it computes of them; None if
    ``kernel`` computes nothing like it."""
    limit = _number(module, LIMITS)
    scales = TRIAL_SCALES if limit is None else (*TRIAL_SCALES, 4 * limit)
    numbers = drawn(1, len(scales), 2 * TRIAL_WIDTH, scales=scales).to(device)
    trials = []
    for kind in dict.fromkeys((torch.float32, dtype)):
        rows = numbers.to(kind)
        wanted = given_by(theirs, rows)
        if wanted is None:
            return None
        trials.append((rows, wanted))
    with torch.inference_mode():
        for split in splits:
            for formula in _candidates(module, limit):
                for rows, wanted in trials:
                    run = partial(kernel, *split(rows), *formula)
                    given = tried(device, "gates run by torch", run)
                    if given is None:
                        return None
                    if not alike(given, wanted, ERRORS_MAX[rows.dtype]):
                        break
                else:
                    return split, formula
    return None


def _candidates(module: Any, limit: float | None) -> Iterator[Formula]:
    alpha = _number(module, ALPHAS)
    own = () if alpha is None else (Formula(alpha, shift=1.0), Formula(alpha))
    for formula in (*own, *KNOWN):
        if limit is not None:
            yield formula._replace(limit=limit)
        yield formula


def _number(module: Any, names: tuple[str, ...]) -> float | None:
    found = (getattr(module, name, None) for name in names)
    return next((float(value) for value in found if isinstance(value, int | float)), None)
