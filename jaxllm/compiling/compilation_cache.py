"""Set up JAX's persistent compilation cache."""

from __future__ import annotations

import logging
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

_log = logging.getLogger(__name__)


def use_compilation_cache(folder: Path) -> None:
    """Make JAX cache compiled programs in `folder`; warn and cache nothing if it cannot be created."""
    place = str(folder) if _can_be_folder(folder) else None
    if jax.config.values["jax_compilation_cache_dir"] != place:
        compilation_cache.reset_cache()  # JAX otherwise keeps the folder of the process's first engine
    jax.config.update("jax_compilation_cache_dir", place)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # jax 0.10 hashes the path of XLA's caches into every key: a moved folder would never hit.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def _can_be_folder(folder: Path) -> bool:
    """Create a folder; warn and return False on failure: JAX would warn once per program."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _log.warning("compiled programs are not kept: %s: %s; set compilation_cache_dir", folder, error.strerror)
        return False
    return True
