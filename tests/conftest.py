"""Settings of all tests: CPU with four virtual devices, no network, programs cached beside the repository."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("JAXLLM_CACHE_DIR", str(Path(__file__).parent.parent / ".cache" / "programs"))
