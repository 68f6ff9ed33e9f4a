"""The model that ships inside the package: a tiny Llama, the script that writes its text and the script that trains it.

Importing this package costs nothing but the path below; the training modules are imported only when they are run.
"""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).resolve().parent / "model"
