"""Make torchvision importable with a torch for which it has no compiled operators."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

_LIBRARIES: list[Any] = []  # the operators live as long as these


def prepare() -> None:
    """Declare the operators that torchvision describes when it is imported."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    torch: Any = importlib.import_module("torch")
    if _LIBRARIES:
        return
    try:
        torch.ops.load_library(str(next(Path(spec.origin).parent.glob("_C*.so"))))
        return
    except (OSError, StopIteration):
        pass
    library = torch.library.Library("torchvision", "FRAGMENT")
    _LIBRARIES.append(library)
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
