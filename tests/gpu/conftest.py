"""Lets XLA's GPU compiler run without a GPU and without CUDA, with Triton's assembler."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

# The plugin checks the versions of CUDA's libraries, which are missing.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
if os.environ.get("GPU_AOT") == "1":  # of `make gpu-aot`: missing packages are errors, not reasons to skip
    for _name in ("triton", "jax_cuda13_plugin"):
        importlib.import_module(_name)

_triton = importlib.util.find_spec("triton")
if _triton is not None and _triton.origin is not None and importlib.util.find_spec("jax_cuda13_plugin") is not None:
    _nvidia = Path(_triton.origin).parent / "backends" / "nvidia"
    _toolkit = Path(tempfile.mkdtemp(prefix="jaxllm-cuda-"))
    atexit.register(shutil.rmtree, _toolkit, ignore_errors=True)
    (_toolkit / "nvvm" / "libdevice").mkdir(parents=True)
    (_toolkit / "bin").symlink_to(_nvidia / "bin")
    (_toolkit / "nvvm" / "libdevice" / "libdevice.10.bc").symlink_to(_nvidia / "lib" / "libdevice.10.bc")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_cuda_data_dir={_toolkit}"
