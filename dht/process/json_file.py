"""Reads JSON that others wrote, such as the files that come with a model.

Whatever is wrong with it is a ValueError: bytes that are no text, nesting without end, other types.
"""

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
DEPTH_MAX = 64
"""Maximum objects and lists within each other: whatever is made of a value recurses over them."""
Json = dict[str, Any]
"""A JSON object as Python has it."""


def read_object(path: Path) -> Json:
    """The JSON object in the file ``path``, with ``Infinity`` and ``NaN`` as Python writes them.

    Raises OSError where it cannot be read, and ValueError where it holds anything else.
    """
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(read, dict):
        raise ValueError("it is no JSON object")
    if is_deep(read):
        raise ValueError("it is nested too deeply")
    return read


def is_deep(value: Any) -> bool:
    """Whether more than ``DEPTH_MAX`` objects and lists lie within each other."""
    level = [value]
    for _ in range(DEPTH_MAX + 1):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return any(isinstance(each, dict | list) for each in level)


def object_or_empty(path: Path) -> Json:
    """:func:`read_object`; an empty object where the file is not there or holds anything else."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}


def decode_json(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """The value of type ``kind`` that the JSON text ``data`` holds; raises ValueError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error


def value_or_none(path: Path, kind: type[T], bytes_max: int = -1) -> T | None:
    """The value of type ``kind`` in the file ``path``, of which ``bytes_max`` bytes are read, or
    all; None where it is not there or holds anything else."""
    try:
        with path.open("rb") as file:
            return decode_json(file.read(bytes_max), kind)
    except (OSError, ValueError):
        return None
