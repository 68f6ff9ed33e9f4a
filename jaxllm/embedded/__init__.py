"""The model that ships inside the package, a tiny Llama; `training/` writes its text and trains it."""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).resolve().parent / "model"
