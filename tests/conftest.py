"""Settings of all tests: CPU, four virtual devices, no network, shapes checked, programs cached beside the code.

A program that is found in the cache is traced all the same, so its shapes are checked in every run.
"""

import os
from pathlib import Path

from jaxtyping import install_import_hook

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("JAXLLM_CACHE_DIR", str(Path(__file__).parent.parent / ".cache" / "programs"))

install_import_hook(["jaxllm.model.decoder", "pallas_kernels.api"], "beartype.beartype")
