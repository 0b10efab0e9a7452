"""Reads ``node.join``'s configuration file: TOML with the flags' own names. Pure.

model = "org/name"
gpu = 0
initial-peers = ["/ip4/…/tcp/…/p2p/…"]
"""

import argparse
import tomllib
from collections.abc import Sequence

from dht.command_line import nearest
from dht.errors import UserError

FILE_BYTES_MAX = 64 << 10


def as_flags(text: str, parser: argparse.ArgumentParser) -> list[str]:
    """The file's entries as command-line arguments, to be placed before the typed ones.

    Typed arguments therefore override the file, and both are checked in the same way. Raises
    UserError if the file is not TOML, names an unknown flag or has a value of the wrong shape.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"it is not TOML: {error}") from None
    flags: list[str] = []
    known = {option: action for action in parser._actions for option in action.option_strings}
    for name, value in table.items():
        action = known.get(f"--{name}")
        if action is None or name in {"help", "help-all", "config"}:
            near = nearest(name, [option.removeprefix("--") for option in known])
            meant = f"; did you mean {near}?" if near else ""
            raise UserError(f"{name!r} is no flag of this{meant}")
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise UserError(f"{name} is {value!r}; give true or false")
            flags += [f"--{name}"] if value else []
            continue
        values: Sequence[object] = value if isinstance(value, list) else [value]
        if isinstance(value, list) and action.nargs not in {"+", "*"}:
            raise UserError(f"{name} takes one value, not a list")
        if not all(isinstance(each, str | int | float) and each is not True for each in values):
            raise UserError(f"{name} takes text or numbers")
        if action.nargs is None:
            flags.append(f"--{name}={values[0]}")  # the value may start with a dash
        else:
            flags += [f"--{name}", *map(str, values)]
    return flags
