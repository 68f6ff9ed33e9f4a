"""Build the C++ kernels with the local compiler, and register them with JAX.

A library is cached under a hash of sources, command, compiler, processor and jaxlib. It ends with its content's hash:
truncated files can crash.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import logging
import math
import os
import platform
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax.ffi

from pallas_kernels.own_folders import OwnFolder

HERE = Path(__file__).parent
SOURCES = ("linear.cc", "attention.cc")
HANDLERS = ("jaxllm_linear", "jaxllm_decode", "jaxllm_prefill")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread", "-w")
_NEEDED = frozenset({"avx2", "fma", "f16c"})  # Linux's names
_LONGEST_BUILD = 300  # seconds; usually 10
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_log = logging.getLogger(__name__)
_building = threading.Lock()
RETRY_SECONDS = 60.0  # lifetime of a refusal


class Refused(Exception):
    """The kernels are unavailable, for a reason of one line."""


@dataclass
class Refusal:
    """Why the library is unavailable, until when."""

    reason: str | None = None
    until: float = 0.0  # `time.monotonic`


refused = Refusal()


@functools.cache
def digest() -> str:
    """Hash the sources, for kernel names in cached programs."""
    files = sorted([*SOURCES, *(path.name for path in HERE.glob("*.h"))])
    return hashlib.sha256(b"".join((HERE / file).read_bytes() for file in files)).hexdigest()[:12]


def target(handler: str) -> str:
    return f"{handler}_{digest()}"


def refusal() -> str | None:
    """Build and register the kernels if necessary; return why they are unavailable, or None."""
    with _building:
        if time.monotonic() >= refused.until:
            refused.reason = _ready()
            refused.until = time.monotonic() + RETRY_SECONDS if refused.reason else math.inf
        return refused.reason


def _ready() -> str | None:
    try:
        library = loaded(cache_folder())
    except (Refused, OSError, RuntimeError) as error:
        return str(error)
    for handler in HANDLERS:
        jax.ffi.register_ffi_target(target(handler), jax.ffi.pycapsule(getattr(library, handler)), platform="cpu")
    return None


def cache_folder() -> Path:
    if "JAXLLM_CACHE_DIR" in os.environ:
        return Path(os.environ["JAXLLM_CACHE_DIR"]).expanduser() / "native"
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "jaxllm" / "native"


def loaded(folder: Path, flags: Sequence[str] = FLAGS) -> ctypes.CDLL:
    """Load the library, built if not cached in `folder`; raises `Refused`."""
    features = processor()
    missing = sorted(_NEEDED - features)
    if missing:
        raise Refused(f"the processor lacks {', '.join(missing)}")
    compiler = next(filter(None, map(shutil.which, [os.environ.get("CXX", ""), *COMPILERS])), None)
    if compiler is None:
        raise Refused(f"no C++ compiler is installed (looked for $CXX, {', '.join(COMPILERS)})")
    command = [compiler, *flags, f"-I{jax.ffi.include_dir()}"]
    place = kept(folder, "kernels", command, [HERE / source for source in SOURCES], [digest(), *sorted(features)])
    try:
        library = ctypes.CDLL(str(place))
    except OSError as error:
        raise Refused(f"the kernels cannot be loaded: {error}".replace("\n", " ")) from error
    if library.jaxllm_check() != 0:
        raise Refused(f"the kernels that {compiler} made multiply wrongly; they are in {place}")
    return library


def kept(folder: Path, name: str, command: list[str], sources: Sequence[Path], says: Sequence[str]) -> Path:
    """Return the path of a library, built unless cached; raise `Refused` if the build fails.

    The key omits header folders, so that virtual environments share libraries, and sources: `says` has their digest.
    """
    flags = [flag for flag in command if not flag.startswith("-I")]
    depends = [*says, *flags, run_command([command[0], "--version"]), importlib.metadata.version("jaxlib")]
    place = _own(folder) / f"{name}-{hashlib.sha256(chr(0).join(depends).encode()).hexdigest()[:24]}.so"
    return place if _is_safe(place) and is_whole(place) else compile_library(command, sources, place)


def _own(folder: Path) -> Path:
    """Return the folder if only this user can write to it, else a private temporary one."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid == os.getuid() and folder.stat().st_mode & _OTHERS_WRITE:
            folder.chmod(0o700)
    except OSError:
        pass  # perhaps read-only
    if _is_safe(folder):
        return folder
    if folder.exists():
        _log.warning("kernels are not kept in %s, which other users own or can write", folder)
    return OwnFolder().path


def _is_safe(path: Path) -> bool:
    """Return whether a path is this user's or root's, and no others can write to it; parents are not checked."""
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid in (0, os.getuid()) and not found.st_mode & _OTHERS_WRITE


def processor() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split()) | {platform.machine()}


def is_whole(file: Path) -> bool:
    try:
        content = file.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def compile_library(command: list[str], sources: Sequence[Path], place: Path) -> Path:
    """Build at `place`, or in a private folder if that is not writable."""
    _log.warning("building kernels, once for this machine, which takes up to 20 seconds: %s", place)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = OwnFolder(place.parent)
    except OSError:
        temporary = OwnFolder()
        place = temporary.path / place.name
    try:
        made = temporary.path / "made.so"
        objects = [f"{made}.{source.name}.o" for source in sources]
        with ThreadPoolExecutor() as pool:
            compiled = pool.map(
                lambda source, into: run_command([*command, "-c", str(source), "-o", into]), sources, objects
            )
            list(compiled)
        run_command([*command, *objects, "-o", str(made)])
        content = made.read_bytes()
        made.write_bytes(content + hashlib.sha256(content).digest())
        made.chmod(0o755)
        made.replace(place)
    finally:
        if place.parent != temporary.path:
            temporary.remove()
    return place


def run_command(command: list[str]) -> str:
    """Return the output; raise `Refused` with the main error line."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_BUILD, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"{command[0]} failed: {error}"[:200]) from error
    if done.returncode != 0:
        lines = done.stderr.splitlines() or [f"exit code {done.returncode}"]
        worst = next((line for line in lines if "error" in line), lines[-1])
        raise Refused(f"{command[0]} failed: {worst}"[:200])
    return done.stdout
