"""Excludes the live comparison, which needs torch, from the default run: use `pytest -m parity tests/parity`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import torchvision

torchvision.prepare()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return (
        True if collection_path.name.startswith("test_live") and "parity" not in config.getoption("markexpr") else None
    )
