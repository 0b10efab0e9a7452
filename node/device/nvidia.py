"""Reads sensors and sets the power limit of one NVIDIA GPU, through ``nvidia-smi``.

A GPU is named by its UUID: torch and the driver may number a machine's GPUs differently.
"""

import logging
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from dht.errors import UserError

logger = logging.getLogger(__name__)
TIMEOUT_S = 5.0
SETTLED_W = 0.5


def sensors(gpu: str) -> tuple[float | None, float | None]:
    """Temperature in °C and power in W; None if the driver does not report it."""
    try:
        first, second = _query(gpu, "temperature.gpu", "power.draw")
    except _DriverError:
        return None, None
    return first, second


@contextmanager
def held_to(gpu: str, limit_w: float | None) -> Iterator[None]:
    """Limit the GPU to ``limit_w`` watts within the context, then restore its former limit.

    Raises UserError if the driver refuses the limit, with the range it accepts or the reason.
    """
    if limit_w is None:
        yield
        return
    try:
        before_w, least_w, most_w = _query(gpu, "power.limit", "power.min_limit", "power.max_limit")
    except _DriverError as error:
        raise UserError(f"--power-limit cannot be set: {error}") from None
    if before_w is None or least_w is None or most_w is None:
        raise UserError("--power-limit cannot be set: this GPU's driver tells no power limits")
    if not least_w <= limit_w <= most_w:
        raise UserError(
            f"--power-limit is {limit_w:g} W; this GPU takes {least_w:g} to {most_w:g} W"
        )
    if abs(before_w - limit_w) < SETTLED_W:
        yield
        return
    try:
        _run(gpu, f"--power-limit={limit_w:g}")
    except _DriverError as error:
        raise UserError(
            f"--power-limit cannot be set: {error}. Drivers take it from an administrator only:"
            f" sudo nvidia-smi --id={gpu} --power-limit={limit_w:g}, then join with the same"
            " --power-limit"
        ) from None
    try:
        yield
    finally:
        try:
            _run(gpu, f"--power-limit={before_w:g}")
        except _DriverError as error:
            logger.warning("the GPU's power limit stays at %g W: %s", limit_w, error)


class _DriverError(Exception):
    """nvidia-smi is missing, slow, or failed; the message says which."""


def _query(gpu: str, *names: str) -> list[float | None]:
    told = _run(gpu, f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits")
    values = parse_answer(told)
    return [*values, *[None] * len(names)][: len(names)]


def parse_answer(line: str) -> list[float | None]:
    """``61, 143.20`` as numbers; anything else (``[N/A]``) is None."""
    values: list[float | None] = []
    for part in line.strip().split(","):
        try:
            values.append(float(part))
        except ValueError:
            values.append(None)
    return values


def _run(gpu: str, *arguments: str) -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        raise _DriverError("there is no nvidia-smi")
    try:
        done = subprocess.run(
            [command, f"--id={gpu}", *arguments],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise _DriverError(f"nvidia-smi failed: {error}") from None
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise _DriverError(said[-1][:200] if said else f"nvidia-smi ended with {done.returncode}")
    return done.stdout
