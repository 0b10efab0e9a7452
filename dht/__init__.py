"""The shared types, messages and records of a swarm, and the transports between its peers."""

import os
import signal
import threading
from types import FrameType


def _as_if_interrupted(_: int, frame: FrameType | None) -> None:
    """Do what SIGINT does; what is started in the background of a shell ignores that."""
    interrupt = signal.getsignal(signal.SIGINT)
    if not callable(interrupt):
        raise KeyboardInterrupt
    interrupt(signal.SIGINT, frame)


# Before anything imports transformers, which would ask a hub for kernels and run them.
os.environ["USE_HUB_KERNELS"] = "0"

# The kernel drops a signal to PID 1 for which there is no handler, and Python has one for SIGINT
# alone. A container that is stopped in its first seconds, while modules are imported, must end.
if (
    os.getpid() == 1
    and threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
):
    signal.signal(signal.SIGTERM, _as_if_interrupted)
