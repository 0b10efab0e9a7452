"""Finds this software's packages where this one is, whatever else has their names."""

import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

PARTS = ("dht", "coordinator", "node", "client")
HOME = Path(__file__).resolve().parents[1]
"""The directory that holds this package and the others."""


class ShadowedWarning(UserWarning):
    """Another module has the name of a part of this software, and cannot be imported by it."""


class _OwnParts(MetaPathFinder):
    """Finds ``PARTS`` in ``HOME``, before any other place is looked at."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """The part's specification; None for all other modules."""
        if fullname not in PARTS or path is not None:
            return None
        found = PathFinder.find_spec(fullname, [str(HOME)])
        other = PathFinder.find_spec(fullname, None)
        # A namespace package has no origin, and holds nothing that anybody could miss.
        if found is not None and other is not None and _is_foreign(fullname, other.origin):
            warnings.warn(
                f"{other.origin} has the name of a part of Anabranch, which is used instead:"
                " rename it",
                ShadowedWarning,
                stacklevel=2,
            )
        return found


def _is_foreign(name: str, origin: str | None) -> bool:
    return origin is not None and Path(origin).resolve() != HOME / name / "__init__.py"


def find_own_parts() -> None:
    """Let all imports of ``PARTS`` find those of this software.

    Raises ImportError, in one line, where another module of such a name was imported before.
    """
    for name in PARTS:
        module = sys.modules.get(name)
        where = getattr(module, "__file__", None)
        if module is not None and _is_foreign(name, where):
            raise ImportError(
                f"{where} was imported as {name}, which is the name of a part of Anabranch:"
                " rename it, or import anabranch first",
                name=name,
                path=where,
            )
    if not any(isinstance(finder, _OwnParts) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OwnParts())
