"""Writes client.txt: the pins of product.txt that a client alone needs, without torch and OR-Tools.

``python locks/client.py .venv .venv-light > locks/client.txt`` follows what installed packages
require, in an environment with hivemind and in one with py-libp2p, whose own packages are only for
where hivemind's daemon is not.
"""

import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).resolve().parent
HEAD = (
    "# What a client alone needs, with hashes: no torch, no OR-Tools. `make lock` writes it anew.\n"
)
NEEDED = (
    *("aiohttp", "base58", "cryptography", "filelock", "hivemind", "huggingface-hub", "jinja2"),
    *("libp2p", "msgspec", "prometheus-client", "psutil", "rich"),
    *("tokenizers", "uvloop", "zeroconf"),
)
"""The packages that ``client`` and what it stands on import."""
WITHOUT = frozenset(
    {
        *("configargparse", "grpcio-tools", "numpy", "prefetch-generator", "scipy", "torch"),
        "hf-xet",
    }
)
"""Of hivemind, for parts of it that are not imported here (:mod:`dht.daemon.lean_hivemind`); and
what makes the hub's large files come faster."""


def closure(installed: Iterable[Distribution]) -> set[str]:
    """The names of what is needed of the packages ``installed``."""
    known = {canonicalize_name(each.name): each for each in installed}
    found: set[str] = set()
    todo = [*NEEDED]
    while todo:
        name = canonicalize_name(todo.pop())
        if name in found or name in WITHOUT or name not in known:
            continue
        found.add(name)
        wanted = map(Requirement, known[name].requires or ())
        todo += [
            each.name
            for each in wanted
            if each.marker is None or each.marker.evaluate({"extra": ""})
        ]
    return found


def main() -> None:
    daemon, light = (
        closure(distributions(path=[*map(str, Path(each).glob("lib/python*/site-packages"))]))
        for each in sys.argv[1:]
    )
    pins = re.split(r"^(?=\S)", (HERE / "product.txt").read_text(), flags=re.MULTILINE)
    (where,) = re.findall(r"^libp2p==\S+ (;.+) \\$", "".join(pins), re.MULTILINE)
    sys.stdout.write(HEAD)
    for each in pins:
        name = re.split(r"[= ]", each)[0]
        if name in daemon or name in light:
            alone = name not in daemon and ";" not in each
            sys.stdout.write(each.replace(" \\", f" {where} \\", 1) if alone else each)


if __name__ == "__main__":
    main()
