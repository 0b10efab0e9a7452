"""Put on PYTHONPATH of a process: no package can be imported that ``locks/client.txt`` has not.

Python imports a module of this name at its start.
"""

import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType

from packaging.utils import canonicalize_name

LOCK = Path(__file__).parents[3] / "locks" / "client.txt"
HELD = frozenset(
    map(canonicalize_name, re.findall(r"^([^\s#=]+)==", LOCK.read_text(), re.MULTILINE))
)
LEFT_OUT = frozenset(
    module
    for module, packages in packages_distributions().items()
    if HELD.isdisjoint(map(canonicalize_name, packages))
)


class Alone:
    """Finds no module of the packages that are left out."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in LEFT_OUT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


sys.meta_path.insert(0, Alone())
