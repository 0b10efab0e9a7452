"""Starts one solve in a process of its own and kills it when it takes too long."""

import asyncio
import logging
import sys
from pathlib import Path

import msgspec

from coordinator.planning.solve import SolveAnswer, SolveRequest

logger = logging.getLogger(__name__)

HOME = Path(__file__).resolve().parents[2]
"""Where the process is started, so that it finds this package and not another of its name."""


async def solve_apart(request: SolveRequest, limit_s: float) -> SolveAnswer:
    """Solve in a process of its own, killed after ``limit_s`` seconds or when cancelled.

    Where the solver fails, the answer's ``error`` says why.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "coordinator.planning.solve",
        cwd=HOME,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(limit_s):
            out, err = await process.communicate(msgspec.msgpack.encode(request))
    except TimeoutError:
        return SolveAnswer(error=f"the solver did not end within {limit_s:.0f} s")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if err:
        logger.error("the solver says: %s", err.decode(errors="replace")[-1000:])
    if process.returncode != 0:
        return SolveAnswer(error=f"the solver ended with {process.returncode}")
    return msgspec.msgpack.decode(out, type=SolveAnswer)
