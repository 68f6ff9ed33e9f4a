"""Keeps the live comparison, which needs torch, out of the default run: `pytest -m parity tests/parity` collects it."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return (
        True if collection_path.name.startswith("test_live") and "parity" not in config.getoption("markexpr") else None
    )
