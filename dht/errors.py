"""Errors of all packages, split by whose fault they are.

A message gives the value, the limit and what to do next; commands print it as one plain line.
"""


class AnabranchError(Exception):
    """Root of all errors that this project raises on purpose."""


class UserError(AnabranchError):
    """The caller's mistake: commands print the message and exit with code 2.

    ``field`` is the name of what is wrong, where the caller gave it by a name.
    """

    def __init__(self, message: str = "", *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class PeerError(AnabranchError):
    """Another peer broke the protocol: its stream is closed and the event is counted."""


class NetworkError(AnabranchError):
    """A peer cannot be reached, or a connection ended or stayed silent: exit code 3."""


class SwarmError(AnabranchError):
    """The swarm as it is now cannot serve this request: commands exit with code 3."""


class MachineError(AnabranchError):
    """This machine failed, for example its GPU, or a part of this process did again and again: exit
    code 1. Starting again may help."""


def reason_of(error: Exception) -> str:
    """What an error says, without numbers of the system's errors and a path said already."""
    if isinstance(error, FileExistsError) and error.filename:  # a file where a folder is needed
        return f"{error.filename} is not a directory"
    return getattr(error, "strerror", None) or str(error)


def first_line(error: Exception) -> str:
    """First line of what an error of some library says; the error itself if that is nothing."""
    return (str(error).strip().splitlines() or [repr(error)])[0]
