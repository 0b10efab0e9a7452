"""Imports hivemind without the parts that train models.

``import hivemind`` runs its package file, which imports its optimisers, mixture-of-experts and
averaging, and with them SciPy. None of these are used here, and they take about 45 MiB and most of
a second in every peer (measured by ``bench speed.footprint``). hivemind's DHT and libp2p modules do
not need the package file. They do name futures shared between processes and descriptions of
tensors, which nothing here uses and which would bring torch into every client.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

WITHOUT_TORCH = {
    "hivemind.utils.mpfuture": "MPFuture",
    "hivemind.utils.tensor_descr": "TensorDescriptor",
}
"""Modules that need torch, and the one name that hivemind's own package takes from each."""


def prepare_hivemind() -> None:
    """Let ``hivemind.dht`` and ``hivemind.p2p`` be imported without their package file and torch.

    Does nothing where hivemind was imported already. Raises ModuleNotFoundError without hivemind.
    """
    if "hivemind" in sys.modules:
        return
    spec = importlib.util.find_spec("hivemind")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("hivemind is not installed", name="hivemind")
    package = ModuleType("hivemind")
    package.__file__ = spec.origin
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = ModuleSpec("hivemind", None, origin=spec.origin, is_package=True)
    package.__spec__.submodule_search_locations = package.__path__
    sys.modules["hivemind"] = package
    for module, name in WITHOUT_TORCH.items():
        empty = ModuleType(module)
        setattr(empty, name, type(name, (), {}))
        sys.modules[module] = empty
