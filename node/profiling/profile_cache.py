"""Keeps profiles of earlier joins on this disk, so that joining again measures nothing.

There is one file per (device, driver, model, precision, versions). Any error in a file only costs a
measurement.
"""

import hashlib
import json
import logging
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from dht.process.home import cache_directory
from dht.process.json_file import decode_json
from dht.process.whole_file import write_whole
from node.engine.engine import Engine
from node.profiling.layer_profile import feasible, measure, room_for_timing
from node.profiling.layer_rates import Profile

logger = logging.getLogger(__name__)

VERSION = 4
FILE_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """The properties that a layer's time depends on."""

    device: str
    driver: str
    threads: int
    """Number of CPU threads."""
    model: str
    """Fingerprint of the model's configuration and tensors."""
    precision: str
    torch: str
    version: int = VERSION

    @classmethod
    def of(cls, engine: Engine) -> "ProfileKey":
        config, device = engine.config, engine.device
        cuda = device.type == "cuda"
        kernels = ["pages"] if engine.by_pages else []
        return cls(
            device=torch.cuda.get_device_name(device) if cuda else _cpu_name(),
            driver=driver() if cuda else "",
            threads=torch.get_num_threads(),
            model=engine.spec.fingerprint,
            precision="/".join([config.dtype, config.quantize or "", *kernels]),
            torch=torch.__version__,
        )

    def path(self, folder: Path) -> Path:
        text = json.dumps(asdict(self), sort_keys=True)
        return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    key: ProfileKey
    profile: Profile


def default_folder() -> Path:
    """The folder of this user's profiles (:func:`dht.process.home.cache_directory`)."""
    return cache_directory("profiles")


def kept_profile(folder: Path, key: ProfileKey) -> Profile | None:
    """The profile kept for ``key``; None if there is none that can be read."""
    path = key.path(folder)
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ValueError("too long")
        kept = decode_json(path.read_bytes(), _Kept)
        if kept.key != key or not _is_sound(kept.profile):
            raise ValueError("of something else, or without times")
        return kept.profile
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("the profile in %s is left alone: %s", path, error)
        return None


def keep_profile(folder: Path, key: ProfileKey, profile: Profile) -> None:
    """Write a profile; if that fails, the next join measures again."""
    path = key.path(folder)
    text = json.dumps(asdict(_Kept(key=key, profile=profile)), indent=1)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except OSError as error:
        logger.warning("the profile cannot be kept in %s: %s", folder, error)


def _is_sound(profile: Profile) -> bool:
    """Whether a profile has times, all of them of steps that there can be."""
    timings = (*profile.points, *profile.checks, *profile.prefills)
    return bool(profile.points) and all(
        timing.batch >= 1 and timing.context_tokens >= 0 and timing.seconds > 0
        for timing in timings
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def driver() -> str:
    """The GPU driver's version, or the CUDA or HIP version of torch if unknown."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:  # not Linux or not NVIDIA: torch's own build tells enough
        return str(torch.version.cuda or torch.version.hip)


def profiled(engine: Engine, folder: Path, *, refresh: bool) -> tuple[Profile, bool]:
    """The engine's profile, and whether it was kept from earlier rather than measured now.

    It is measured again if ``refresh``, or if points are feasible now that were not then.
    """
    key = ProfileKey.of(engine)
    kept = None if refresh else kept_profile(folder, key)
    if kept is not None:
        now = feasible(engine, room_for_timing(engine))
        if set(now) <= set(feasible(engine, kept.kv_tokens)):
            return kept, True
    measured = measure(engine)
    keep_profile(folder, key, measured)
    return measured, False
