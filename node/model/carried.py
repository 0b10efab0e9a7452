"""Rows that carry more than one hidden state per token from one layer to the next.

Some models hand their layers more than that: several streams of hidden states, inputs computed from
token ids for each layer, the tokens that a layer before has chosen to attend to, keys and values of
a layer before. A session's layers may be on several machines, so whatever layers behind a boundary
need and cannot compute travels across it, as further numbers of the same row. All rows of a model
have one width, that of its widest boundary; the rest of a row is zero. What comes is as hostile as
any row: widths are fixed by the model's structure, numbers must be finite, and tokens must be
inside the session's context.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch

from node.kv.layer_pool import KvShape

Argument = int | str
"""An argument of a layer beside its hidden states: its place, or its name."""
Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, ``[1, kv_heads, tokens, width]`` each."""

DIGITS, BASE = 3, 256
"""Integers travel as digits, so that each is exact in any dtype of rows."""
INTEGERS_MAX = BASE**DIGITS - 2


class NoForm(Exception):
    """A tensor that has no entry of its own for each token."""


class UnsoundRows(ValueError):
    """Rows carry what this session's layers cannot have sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenForm:
    """How a tensor becomes rows of numbers, one row per token, and comes back."""

    shape: tuple[int, ...]
    """Shape without the dimension of tokens."""
    dim: int
    """Dimension of tokens."""
    integers: bool = False

    @classmethod
    def of(cls, one: torch.Tensor, other: torch.Tensor) -> "TokenForm":
        """The form of tensors made in the same way for two numbers of tokens. Raises NoForm."""
        dims = [at for at, (m, n) in enumerate(zip(one.shape, other.shape, strict=False)) if m != n]
        if one.dim() != other.dim() or len(dims) != 1 or one.dtype is torch.bool:
            raise NoForm(f"shapes {tuple(one.shape)} and {tuple(other.shape)}")
        shape = tuple(size for at, size in enumerate(one.shape) if at != dims[0])
        return cls(shape=shape, dim=dims[0], integers=not one.is_floating_point())

    @property
    def width(self) -> int:
        """Numbers per token."""
        return torch.Size(self.shape).numel() * (DIGITS if self.integers else 1)

    def rows(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``[tokens, width]`` in ``dtype``."""
        flat = tensor.movedim(self.dim, 0).flatten(1) if tensor.dim() > 1 else tensor[:, None]
        return (digits(flat) if self.integers else flat).to(dtype)

    def tensor(self, rows: torch.Tensor) -> torch.Tensor:
        """The tensor of ``rows``, ``[tokens, width]``; its tokens are along ``dim``. Raises
        UnsoundRows for digits that are none."""
        flat = integers(rows) if self.integers else rows
        return flat.reshape(rows.shape[0], *self.shape).movedim(0, self.dim)


def digits(numbers: torch.Tensor) -> torch.Tensor:
    """Digits of each number plus one: ``[…, count]`` becomes ``[…, count × DIGITS]``. -1, which
    stands for no number, becomes zeros."""
    if numbers.numel() and not -1 <= int(numbers.min()) <= int(numbers.max()) <= INTEGERS_MAX:
        raise UnsoundRows(f"integers beyond {INTEGERS_MAX} do not travel")
    known = numbers.long()[..., None] + 1
    powers = BASE ** torch.arange(DIGITS, device=numbers.device)
    return (known // powers % BASE).flatten(-2)


def integers(rows: torch.Tensor) -> torch.Tensor:
    """The numbers of :func:`digits`, ``[…, count]`` int64. Raises UnsoundRows for digits that are
    none."""
    if not bool(((rows >= 0) & (rows < BASE) & (rows == rows.round())).all()):
        raise UnsoundRows("the digits of a number are not between 0 and 255")
    powers = BASE ** torch.arange(DIGITS, device=rows.device)
    return (rows.long().reshape(*rows.shape[:-1], -1, DIGITS) * powers).sum(-1) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Tokens that a layer attends to as chosen by the layer before."""

    argument: Argument
    most: int
    """Maximum number of tokens for each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Keys and values that a layer takes from a layer before it."""

    key: Any
    """Name under which the layers' code passes them on."""
    source: int
    kv: KvShape


@dataclass(slots=True, kw_only=True)
class Passed:
    """Contents of a session's rows at a boundary between two layers."""

    hidden: torch.Tensor
    inputs: dict[tuple[int, Argument], torch.Tensor] = field(default_factory=dict)
    chosen: torch.Tensor | None = None
    """``[1, tokens, most]``."""
    shared: dict[Any, Pair] = field(default_factory=dict)
    """New tokens' keys and values by :attr:`Shared.key`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What the rows of a model carry; each tuple has an entry per layer."""

    hidden: TokenForm
    inputs: tuple[tuple[tuple[Argument, TokenForm], ...], ...]
    """Arguments computed from token ids."""
    chosen: tuple[Chosen | None, ...]
    shared: tuple[Shared | None, ...]
    _ends: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    """By boundary, where each part of a row ends: rows are cut in every step."""
    width: int = field(init=False, compare=False)
    """Numbers per row."""

    def __post_init__(self) -> None:
        ends = tuple(self._ends_at(boundary) for boundary in range(len(self.inputs) + 1))
        object.__setattr__(self, "_ends", ends)
        object.__setattr__(self, "width", max(each[-1] for each in ends))

    @property
    def plain(self) -> bool:
        """Whether rows are hidden states alone, one per token."""
        return self.width == self.hidden.width and self.hidden.shape == (1, self.width)

    def _inputs(self, boundary: int) -> Iterator[tuple[int, Argument, TokenForm]]:
        for layer in range(boundary, len(self.inputs)):
            for argument, form in self.inputs[layer]:
                yield layer, argument, form

    def _chosen(self, boundary: int) -> Chosen | None:
        return self.chosen[boundary] if boundary < len(self.chosen) else None

    def _shared(self, boundary: int) -> dict[Any, KvShape]:
        """Keys and values of layers before the boundary that layers behind it take."""
        return {
            each.key: each.kv
            for each in self.shared[boundary:]
            if each is not None and each.source < boundary
        }

    def _ends_at(self, boundary: int) -> tuple[int, ...]:
        """Where each part of a row ends: hidden states, inputs, chosen tokens, keys and values."""
        chosen = self._chosen(boundary)
        widths = [
            self.hidden.width,
            *(form.width for _, _, form in self._inputs(boundary)),
            0 if chosen is None else chosen.most * DIGITS,
            *(kv.numbers for kv in self._shared(boundary).values()),
        ]
        return tuple(accumulate(widths))

    def pack(self, boundary: int, passed: Passed, position: int) -> torch.Tensor:
        """Rows ``[tokens, width]`` in front of layer ``boundary``; the first is at ``position``.

        Tokens behind a row, which a chunk's early rows choose if others are too few, do not travel:
        nothing attends to them, and in a replay they may not be there.
        """
        dtype = passed.hidden.dtype
        parts = [self.hidden.rows(passed.hidden, dtype)]
        parts += [
            form.rows(passed.inputs[layer, argument], dtype)
            for layer, argument, form in self._inputs(boundary)
        ]
        if (chosen := self._chosen(boundary)) is not None:
            if passed.chosen is None or passed.chosen.shape[-1] > chosen.most:
                raise UnsoundRows(f"layer {boundary} needs tokens chosen before it")
            lacking = chosen.most - passed.chosen.shape[-1]
            known = torch.nn.functional.pad(passed.chosen[0].long(), (0, lacking), value=-1)
            own = torch.arange(position, position + len(known), device=known.device)[:, None]
            parts.append(digits(torch.where(known > own, -1, known)).to(dtype))
        for key in self._shared(boundary):
            parts += [each[0].transpose(0, 1).flatten(1) for each in passed.shared[key]]
        rows = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        lacking = self.width - rows.shape[1]
        return torch.nn.functional.pad(rows, (0, lacking)) if lacking else rows

    def unpack(self, boundary: int, rows: torch.Tensor) -> Passed:
        """Contents of ``rows`` in front of layer ``boundary``. Raises UnsoundRows."""
        bounds = [0, *self._ends[boundary]]
        parts = iter([rows[:, start:end] for start, end in pairwise(bounds)])
        passed = Passed(hidden=self.hidden.tensor(next(parts)))
        for layer, argument, form in self._inputs(boundary):
            passed.inputs[layer, argument] = form.tensor(next(parts))
        known = next(parts)
        if known.shape[1]:
            tokens = integers(known)
            # A row that chose fewer tokens repeats one of them: they are a set.
            last = tokens.amax(1, keepdim=True)
            passed.chosen = torch.where(tokens < 0, last, tokens)[None].int()
        for key, kv in self._shared(boundary).items():
            part = next(parts)
            keys = part[:, : kv.kv_heads * kv.key_width]
            passed.shared[key] = (
                _by_head(keys, kv.kv_heads),
                _by_head(part[:, keys.shape[1] :], kv.kv_heads),
            )
        return passed

    def refusal(self, boundary: int, rows: torch.Tensor, context_tokens: int) -> str | None:
        """Why rows of a session with ``context_tokens`` cannot go into layer ``boundary``; None if
        they can."""
        try:
            chosen = self.unpack(boundary, rows).chosen
        except UnsoundRows as error:
            return str(error)
        if chosen is None:
            return None
        own = torch.arange(context_tokens - len(rows), context_tokens, device=rows.device)[:, None]
        if not bool(((chosen >= 0) & (chosen <= own)).all()):
            return "tokens were chosen that are not among those up to their row"
        return None

    def trial(self, boundary: int, hidden: torch.Tensor) -> torch.Tensor:
        """Rows that layers from ``boundary`` on can run, made of numbers ``[tokens, width]``."""
        rows = hidden.clone()
        whole = [form.integers for _, _, form in self._inputs(boundary)]
        whole += [self._chosen(boundary) is not None]
        for (start, end), integer in zip(pairwise(self._ends[boundary]), whole, strict=False):
            if integer:  # 0 each
                rows[:, start:end] = 0
                rows[:, start:end:DIGITS] = 1
        return rows


def _by_head(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """``[1, heads, tokens, width]`` from rows ``[tokens, heads × width]``."""
    return rows.reshape(rows.shape[0], heads, -1).transpose(0, 1)[None]
