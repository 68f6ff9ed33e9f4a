"""Choice of kernels: the best supported one, the named one, or an error with the reason."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import jax
import pytest

import pallas_kernels
from jaxllm.config import EngineConfig
from jaxllm.errors import UserError
from jaxllm.setup.model_setup import OPERATIONS, kernel_reasons, prepare
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
    assert chosen("paged_decode=xla", "write_kv=pallas") == best | {
        "paged_decode": "xla", "write_kv": "pallas",
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
        """Replaces the kernel modules, which need Triton."""

        @staticmethod
        def refusal(operation: str, site: Site) -> str | None:
            return "heads do not fit" if operation.startswith("paged") and site.head_size > 256 else None

    module = choice.module
    monkeypatch.setattr(choice, "module", lambda operation, name: Own if name == "triton" else module(operation, name))
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(choice.importlib.metadata, "version", lambda _: "3.6.0")
    for operation in choice.PREFERRED["gpu"]:
        assert pallas_kernels.resolve(operation, Site("gpu", 90)).of(64) == pallas_kernels.Choice("triton", 90)
        long = pallas_kernels.resolve(operation, Site("gpu", 90, head_size=576))
        assert (long.name, long.reason) == (
            ("xla", "not triton: heads do not fit") if operation.startswith("paged") else ("triton", "")
        )
    monkeypatch.setattr(choice.importlib.metadata, "version", lambda _: "3.5.1")
    assert pallas_kernels.resolve("sample", Site("gpu", 90)).reason == "not triton: it needs triton 3.6, here is 3.5.1"
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda _: None)
    assert pallas_kernels.resolve("sample", Site("gpu", 90)).reason == "not triton: the package triton is not installed"


HOPPER = Site("gpu", 90, "bfloat16", "bfloat16", heads=32, kv_heads=8, head_size=128)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "the package flashinfer-python is not installed"),
        ({"capability": 80}, "of capability 9, 10 and 12"),
        ({"platform": "cpu"}, "for NVIDIA GPUs"),
        ({"dtype": "float32", "cache_dtype": "float32"}, "not in float32 over float32"),
        ({"cache_dtype": "float8_e4m3fn"}, "ours has one for each vector"),
        ({"block_tokens": 8}, "blocks of 16, 32, 64, 128 tokens, not 8"),
        ({"head_size": 40}, "a multiple of 16 up to 256, not 40"),
        ({"head_size": 576, "value_size": 512}, "latent attention"),
        ({"heads": 71, "kv_heads": 1, "head_size": 64}, "71 query heads of 64 for each of keys do not fit"),
        ({"has_softcap": True}, "does not bound scores"),
    ],
)
def test_why_flashinfer_is_not_taken(change: dict, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "pallas_kernels.native.flashinfer.importlib.util.find_spec",
        lambda name: None if name == "flashinfer" else find_spec(name),
    )
    with pytest.raises(ValueError, match=f"paged_decode=flashinfer: .*{reason}"):
        pallas_kernels.resolve("paged_decode", replace(HOPPER, **change), "flashinfer")


def test_what_was_measured_to_be_faster_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    row = choice.deciding("paged_decode", HOPPER) | {"fastest": "flashinfer", "measured": {"times": 1.2}}
    monkeypatch.setattr(choice, "fastest", lambda: [row])
    monkeypatch.setattr(choice, "refusal", lambda operation, name, site: "it has no drum" if site.has_softcap else None)
    names = {site: pallas_kernels.resolve("paged_decode", site) for site in (
        HOPPER, replace(HOPPER, heads=64, kv_heads=16), replace(HOPPER, heads=64), replace(HOPPER, has_softcap=True)
    )}  # fmt: skip
    assert [one.name for one in names.values()] == ["flashinfer", "flashinfer", "triton", "xla"]
    assert [*names.values()][-1].reason == "not flashinfer: it has no drum; not triton: it has no drum"
    assert pallas_kernels.resolve("paged_prefill", HOPPER).name == "triton"


def test_the_choice_of_a_program_is_that_of_its_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured rows decide; above the largest size XLA is used, even if another kernel is requested."""
    rows = [
        {**choice.deciding("fused_linear", replace(HOPPER, tokens=tokens)), "fastest": "xla", "measured": {}}
        for tokens in (1, 16, 32)
    ]
    monkeypatch.setattr(choice, "fastest", lambda: rows)
    monkeypatch.setattr(choice, "refusal", lambda *_: None)
    tokens = (1, 2, 3, 16, 17, 32, 33, 64, 65, 8192)
    found = pallas_kernels.resolve("fused_linear", HOPPER)
    assert [found.of(one).name for one in tokens] == ["xla"] * 6 + ["triton"] * 2 + ["xla"] * 2
    assert str(found) == "xla up to 32 tokens, triton up to 64 tokens, xla"
    other = pallas_kernels.resolve("fused_linear", replace(HOPPER, dtype="float16"))
    assert other.of(1).name == "triton" and str(other) == "triton up to 64 tokens, xla"
    for name in ("xla", "triton"):
        asked = pallas_kernels.resolve("fused_linear", HOPPER, name)
        assert [asked.of(one).name for one in tokens] == [name] * 8 + ["xla"] * 2
        for kernels, why in (([f"fused_linear={name}"], "asked for"), ([], "best on gpu")):
            config = EngineConfig(model=STORIES, kernels=kernels)
            assert kernel_reasons(config, "gpu", {"fused_linear": asked}) == {"fused_linear": why}
    assert str(pallas_kernels.resolve("fused_linear", HOPPER, "xla")) == "xla"


def test_the_table_of_what_was_measured_names_what_there_is() -> None:
    for row in choice.fastest():
        assert row["fastest"] in pallas_kernels.implementations(row["operation"]) and row["measured"]["device"]
        assert set(choice.deciding(row["operation"], HOPPER)) == set(row) - {"fastest", "measured"}


def test_a_device_tells_its_capability() -> None:
    class Device:
        compute_capability = "9.0"

    assert pallas_kernels.capability_of(Device()) == 90
    Device.compute_capability = "gfx942"
    assert pallas_kernels.capability_of(Device()) is None
    assert pallas_kernels.capability_of(jax.devices()[0]) is None
