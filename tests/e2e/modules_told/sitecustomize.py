"""Put on PYTHONPATH of a process: at its end it writes what it imported, a name a line.

The file is named by the process id, in the directory ``MODULES_TOLD_IN``. Python imports a module
of this name at its start.
"""

import atexit
import os
import sys
from pathlib import Path


@atexit.register
def tell() -> None:
    """Write the names of the modules that were loaded."""
    path = Path(os.environ["MODULES_TOLD_IN"], str(os.getpid()))
    path.write_text("\n".join(sorted(sys.modules)), encoding="utf-8")
