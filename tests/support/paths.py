"""Paths in the repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
GOLDEN_POOLED = ROOT / "tests" / "golden_pooled"
STORIES = GOLDEN / "stories260K"
