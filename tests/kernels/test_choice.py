"""Which kernels an engine takes: the best that can do it, or the one that is named, or an error that says why."""

from __future__ import annotations

import jax
import pytest

import pallas_kernels
from jaxllm.config import EngineConfig
from jaxllm.errors import UserError
from jaxllm.runner.model_setup import OPERATIONS, prepare
from pallas_kernels import Site, choice
from pallas_kernels.native import build
from tests.support import paths

STORIES = str(paths.STORIES)


def chosen(*kernels: str) -> dict[str, str]:
    setup = prepare(EngineConfig(model=STORIES, kernels=kernels), needs_weights=False)
    return {operation: one.name for operation, one in setup.kernels.items()}


@pytest.mark.parametrize("refusal", [None, "no C++ compiler is installed"])
def test_a_cpu_takes_what_is_best_there_and_what_is_named(refusal: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "refusal", lambda: refusal)
    best = dict.fromkeys(OPERATIONS, "xla") | {"paged_decode": "xla_lanes"}
    if refusal is None:
        best |= dict.fromkeys(("linear", "paged_decode", "paged_prefill"), "native")
    assert chosen() == best
    assert chosen("paged_decode=xla_gather", "write_kv=pallas") == best | {
        "paged_decode": "xla_gather", "write_kv": "pallas",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ("paged_decode", "'paged_decode' is not operation=implementation; operations are write_kv, paged_decode"),
        ("paged_encode=xla", "'paged_encode=xla' is not operation=implementation"),
        ("paged_decode=cuda", "paged_decode has no implementation 'cuda'; it has xla, xla_lanes"),
        ("sample=triton", "sample=triton: (the package triton is not installed|Triton kernels run on NVIDIA GPUs)"),
    ],
)
def test_what_cannot_be_done_is_an_error_and_nothing_takes_its_place(kernels: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        chosen(kernels)


def test_a_gpu_takes_triton_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own:
        """Stands for the modules of kernels, which need Triton."""

        @staticmethod
        def refusal(operation: str, site: Site) -> str | None:
            return "heads do not fit" if operation.startswith("paged") and site.head_size > 256 else None

    module = choice.module
    monkeypatch.setattr(choice, "module", lambda operation, name: Own if name == "triton" else module(operation, name))
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(choice.importlib.metadata, "version", lambda _: "3.6.0")
    for operation in choice.PREFERRED["gpu"]:
        assert pallas_kernels.resolve(operation, Site("gpu", 90)) == pallas_kernels.Choice("triton", 90)
        long = pallas_kernels.resolve(operation, Site("gpu", 90, head_size=576))
        assert (long.name, long.reason) == (
            ("xla", "not triton: heads do not fit") if operation.startswith("paged") else ("triton", "")
        )
    monkeypatch.setattr(choice.importlib.metadata, "version", lambda _: "3.5.1")
    assert pallas_kernels.resolve("sample", Site("gpu", 90)).reason == "not triton: it needs triton 3.6, here is 3.5.1"
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda _: None)
    assert pallas_kernels.resolve("sample", Site("gpu", 90)).reason == "not triton: the package triton is not installed"


def test_a_device_tells_its_capability() -> None:
    class Device:
        compute_capability = "9.0"

    assert pallas_kernels.capability_of(Device()) == 90
    Device.compute_capability = "gfx942"
    assert pallas_kernels.capability_of(Device()) is None
    assert pallas_kernels.capability_of(jax.devices()[0]) is None
