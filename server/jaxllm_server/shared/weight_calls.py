"""Checks for calls that sleep and update weights."""

from __future__ import annotations

from pathlib import Path

from jaxllm.config import EngineConfig
from jaxllm.errors import FeatureDisabledError, UserError
from jaxllm_server.shared.options import ServerOptions

_MAX_PATH_CHARS = 4096


def check_enabled(config: EngineConfig) -> None:
    if not config.enable_sleep_mode:
        raise FeatureDisabledError("This server was started without --enable-sleep-mode.", "enable_sleep_mode")


def weight_folder(options: ServerOptions, path: str, parameter: str) -> Path:
    """Return a folder below --weights-root; raise UserError for any other path."""
    if options.weights_root is None:
        raise FeatureDisabledError("This server was started without --weights-root.", "weights_root")
    root = Path(options.weights_root).resolve()
    try:
        folder = (root / path).resolve() if len(path) <= _MAX_PATH_CHARS else None
    except (OSError, RuntimeError, ValueError):
        folder = None
    if folder is None or not folder.is_relative_to(root) or not folder.is_dir():
        raise UserError(f"there is no folder {path[:_MAX_PATH_CHARS]!r:.200} below --weights-root.", parameter)
    return folder
