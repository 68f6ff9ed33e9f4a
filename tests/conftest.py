"""Settings of all tests: CPU, four virtual devices, no network, shapes checked, programs cached beside the code.

A program that is found in the cache is traced all the same, so its shapes are checked in every run.
"""

import os
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("JAXLLM_CACHE_DIR", str(Path(__file__).parent.parent / ".cache" / "programs"))

install_import_hook(["jaxllm.model.decoder", "pallas_kernels.api"], "beartype.beartype")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the keys and certificates of `tests.certificates`."""
    from tests.certificates import make_certificates

    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder
