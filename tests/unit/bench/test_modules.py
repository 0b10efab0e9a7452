"""Every benchmark can at least be started: the documents name them as commands."""

import importlib
import pkgutil

import pytest

import bench

MODULES = sorted(module.name for module in pkgutil.walk_packages(bench.__path__, "bench."))


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_a_benchmark_can_be_imported(name: str) -> None:
    importlib.import_module(name)
