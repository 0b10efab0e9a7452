"""Whether a model does nothing with its parts but what the engine does with them.

Some families scale the embedding, the residuals or the logits outside any module, or give each
layer its own rotation. Run part by part such a model would answer nonsense without any error. So
the model's own forward is run once with its parts replaced by recorders, which costs no weights.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

TOKENS = 3

Difference = str | None


class _Recorder(nn.Module):
    """Stands for a part: notes what it is given, returns what ``answer`` makes of it."""

    def __init__(
        self, part: nn.Module, answer: Callable[[torch.Tensor], torch.Tensor], log: list[Any]
    ) -> None:
        super().__init__()
        self.__dict__["part"] = part  # not a child: it is only asked for its attributes
        self._answer = answer
        self._log = log

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["part"], name)

    def forward(self, given: torch.Tensor, *_: Any, **named: Any) -> torch.Tensor:
        self._log.append((given, named))
        return self._answer(given)


def hidden_steps(
    model: nn.Module, names: dict[str, str], layers: int, width: int, rotary: nn.Module
) -> Difference:
    """What ``model`` computes beside its parts, in words; None when there is nothing.

    ``names`` gives the paths of ``embed``, ``layers``, ``norm``, ``head`` and ``rotary``. The
    model is as before afterwards.
    """
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    embedded, normed, logits = noise(1, TOKENS, width), noise(1, TOKENS, width), noise(1, TOKENS, 5)
    logs: dict[str, list[Any]] = {"embed": [], "layers": [], "norm": [], "head": []}
    originals = {part: model.get_submodule(name) for part, name in names.items()}
    stack: Any = originals["layers"]
    fakes: dict[str, nn.Module] = {
        "embed": _Recorder(originals["embed"], lambda _: embedded, logs["embed"]),
        "layers": nn.ModuleList(
            _Recorder(layer, lambda given: given + 1, logs["layers"]) for layer in stack
        ),
        "norm": _Recorder(originals["norm"], lambda _: normed, logs["norm"]),
        "head": _Recorder(originals["head"], lambda _: logits, logs["head"]),
        "rotary": rotary,
    }
    try:
        for part, fake in fakes.items():
            model.set_submodule(names[part], fake)
        with torch.inference_mode():
            out = model(input_ids=torch.arange(TOKENS)[None], use_cache=False)
            expected = rotary(embedded, torch.arange(TOKENS)[None])
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        return f"its layers cannot be run one by one ({type(error).__name__}: {error})"
    finally:
        for part, original in originals.items():
            model.set_submodule(names[part], original)
    if [len(log) for log in logs.values()] != [1, layers, 1, 1]:
        return "its parts are not called once each, in order"
    if not torch.equal(logs["embed"][0][0], torch.arange(TOKENS)[None]):
        return "it changes the token ids before the embedding"
    if not torch.equal(logs["layers"][0][0], embedded):
        return "it changes the embedding before the first layer"
    if not all(_same(named.get("position_embeddings"), expected) for _, named in logs["layers"]):
        return "its layers do not share one rotary embedding"
    if not torch.equal(logs["norm"][0][0], _after(embedded, layers)):
        return "it changes the hidden states between its layers"
    if not torch.equal(logs["head"][0][0], normed):
        return "it changes the hidden states before the head"
    if not torch.equal(out.logits, logits):
        return "it changes the logits behind the head"
    return None


def _after(embedded: torch.Tensor, layers: int) -> torch.Tensor:
    for _ in range(layers):
        embedded = embedded + 1
    return embedded


def _same(given: Any, expected: Any) -> bool:
    return (
        isinstance(given, tuple)
        and isinstance(expected, tuple)
        and len(given) == len(expected)
        and all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))
    )
