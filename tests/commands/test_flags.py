"""Flags set the right fields, and errors in them are reported in one line."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from jaxllm.commands import flags
from jaxllm.config import EngineArgs, EngineConfig
from jaxllm.sampling_params import SamplingParams
from tests.support.fake_llm import FakeLLM, Run, seen_params

TRANSFER = {"kv_transfer_config", "prefill_replicas", "decode_replicas"}  # need other fields, see below
# Texts and values of flags that accept only certain texts.
TEXTS: dict[str, tuple[str, Any]] = {
    **{name: (text, text) for name, text in (("dtype", "float32"), ("device", "cpu"), ("quantization", "int8"))},
    **{name: (text, text) for name, text in (("kv_cache_dtype", "fp8_e4m3"), ("scheduling_policy", "priority"))},
    "preemption_mode": ("swap", "swap"),
    **{name: (text, text) for name, text in (("load_format", "dummy"), ("precompile", "all"), ("runner", "pooling"))},
    **{
        "max_model_len": ("4K", 4096),
        "max_num_batched_tokens": ("2k", 2000),
        "min_tokens": ("1", 1),
        "kernels": ("sample=xla", ("sample=xla",)),
    },
    **{"logits_processors": ("module:function",) * 2, "pooler_config": ('{"pooling_type": "MEAN"}',) * 2},
    "limit_mm_per_prompt": ('{"image": 3}',) * 2,
    "mm_processor_kwargs": ('{"max_pixels": 3136}',) * 2,
    "speculative_config": ('{"method": "ngram", "num_speculative_tokens": 4}',) * 2,
}


def text_and_value(own: Any, number: int) -> tuple[str, Any]:
    """Return a text for a field's flag, different for each field, and its value."""
    kind = str(own.type).removesuffix(" | None")
    match kind.partition("[")[0]:
        case _ if own.name in TEXTS:
            text, value = TEXTS[own.name]
            value = json.loads(text) if kind.startswith("Mapping") else value
            return text, (value,) if own.name == "logits_processors" else value
        case "int":
            return str(number), number
        case "float":
            return f"0.{number}", float(f"0.{number}")
        case "Sequence":
            return (f"{number}", (number,)) if kind == "Sequence[int]" else (f"--x{number}", (f"--x{number}",))
        case _:
            return f"x{number}", f"x{number}"


def test_every_field_is_a_flag_that_reaches_its_place(run: Run) -> None:
    arguments, values = [], {EngineConfig: dict[str, Any](), SamplingParams: dict[str, Any]()}
    own_fields = [(cls, own) for cls in values for own in fields(cls) if own.metadata.get("help") is not None]
    own_fields = [(cls, own) for cls, own in own_fields if own.name not in TRANSFER]
    for number, (cls, own) in enumerate(own_fields, start=10):
        name = "engine-seed" if (cls, own.name) == (EngineConfig, "seed") else own.name.replace("_", "-")
        if str(own.type).startswith("bool"):
            values[cls][own.name] = not own.default
            arguments.append(f"--no-{name}" if own.default else f"--{name}")
        else:
            text, values[cls][own.name] = text_and_value(own, number)
            arguments += [f"--{name}={text}"] if text.startswith("--") else [f"--{name}", text]
    code, _, err = run("generate", "-m", "m", *arguments, "--", "p")
    assert code == 0, err
    assert EngineConfig(model="m", **FakeLLM.made.settings) == EngineConfig(model="m", **values[EngineConfig])
    assert seen_params() == [SamplingParams(**values[SamplingParams])]


def test_the_flags_of_kv_transfer_reach_their_places(run: Run) -> None:
    text = '{"kv_role": "kv_producer", "kv_connector_extra_config": {"lease": 2}}'
    for given in ({"kv_transfer_config": json.loads(text)}, {"prefill_replicas": 1, "decode_replicas": 2}):
        shown = {name: text if isinstance(value, dict) else str(value) for name, value in given.items()}
        words = [word for name, value in shown.items() for word in (f"--{name.replace('_', '-')}", value)]
        code, _, err = run("generate", "-m", "m", "--kv-offloading-size", "1", *words, "p")
        assert code == 0, err
        assert EngineConfig(model="m", **FakeLLM.made.settings | {"precompile": "auto"}) == EngineConfig(
            model="m", kv_offloading_size=1.0, **given
        )


def test_flags_that_are_not_given_leave_the_models_defaults(run: Run) -> None:
    run("generate", "p")
    assert FakeLLM.made.model is None and FakeLLM.made.is_closed
    assert FakeLLM.made.settings == {"precompile": "background"}, "on a GPU one user does not wait for all programs"
    assert seen_params() == [SamplingParams(temperature=0.7, max_tokens=128)]
    run("generate", "--max-tokens", "none", "--min-tokens", "20", "-n", "3", "p")
    assert seen_params() == [SamplingParams(temperature=0.7, max_tokens=None, min_tokens=20, n=3)]


@pytest.mark.parametrize(
    ("text", "value"), [("5", 5), ("-1", -1), ("2k", 2000), ("2K", 2048), ("3m", 3 * 10**6), ("1T", 2**40)]
)
def test_integers_with_units(text: str, value: int) -> None:
    assert flags.integer(text) == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["genrate"], "invalid choice: 'genrate'"),
        (["generate", "--temprature", "1", "x"], "unknown argument --temprature; did you mean --temperature?"),
        (
            ["generate", "--max-model-length=5", "x"],
            "unknown argument --max-model-length=5; did you mean --max-model-len?",
        ),
        (["chat", "--logprobs", "1"], "unknown argument --logprobs"),
        (["chat", "--prompt-logprobs", "1"], "unknown argument --prompt-logprobs"),
        (["chat", "--logprob-token-ids", "1"], "unknown argument --logprob-token-ids"),
        (["generate", "--max-tokens", "1.5k", "x"], "'1.5k' is not an integer (1k is 1000, 1K is 1024)"),
        (["generate", "--top-p", "x", "x"], "argument --top-p: invalid float value: 'x'"),
        (["generate", "--dtype", "int8", "x"], "argument --dtype: invalid choice: 'int8'"),
        (["generate", "--temperature", "-1", "x"], "--temperature must be non-negative, got -1.0."),
        (["generate", "--block-size", "0", "x"], "--block-size must be an integer from 1 to 256, got 0."),
        (["generate", "--min-tokens", "200", "x"], "--min-tokens must be less than or equal to --max-tokens=128"),
        (["doctor", "--max-num-seqs", "0"], "--max-num-seqs must be an integer"),
        (["chat", "--stop", ""], "--stop cannot contain an empty string."),
        (["generate", "--engine-seed", "9" * 30, "x"], "--engine-seed must be an integer"),
        (["doctor", "--seed", "9" * 30], "error: --seed must be an integer"),
        (["serve", "--ssl-certfile", "c"], "TLS needs both --ssl-keyfile and --ssl-certfile."),
        (["serve", "--port", "70000"], "--port must be from 0 to 65535"),
        (["serve", "/no/such/model"], "there is no folder /no/such/model"),
        (["serve", "-tp", "512"], "4, or set XLA_FLAGS=--xla_force_host_platform_device_count=512 to split the CPU."),
        (["serve", "--record", "f", "--record-max-bytes", "5"], "--record-max-bytes must be at least 1048576."),
        (["serve", "--tool-call-parser", "x"], "--tool-call-parser must be one of auto, deepseek_v3, "),
        (["serve", "--reasoning-parser", "x"], "--reasoning-parser must be one of"),
        (["serve", "--otlp-traces-endpoint", "x"], "--otlp-traces-endpoint must be a URL such as"),
        (["serve", "--max-model-len", "1m"], "--max-model-len (1000000) is greater than what the model was made for"),
        (["serve", "--enable-auto-tool-choice"], "--enable-auto-tool-choice requires --tool-call-parser"),
        (["generate", "--max-loras", "3", "--max-cpu-loras", "2", "x"], "--max-cpu-loras (2) must be at least --max-"),
        (["serve", "--lora-root", "/no/folder"], "--lora-root: there is no folder /no/folder."),
        (["serve", "--lora-root", "."], "--lora-root needs --enable-lora."),
        (["serve", "--lora-modules", "a=b"], "--lora-modules needs --enable-lora."),
        (["serve", "--enable-lora", "--lora-modules", "a=/no/adapter"], "adapter 'a': there is no folder /no/adapter"),
        (["serve", "--enable-lora", "--lora-modules", "a", "b=c"], "--lora-modules takes NAME=PATH, or {"),
        (["bench", "serve", "--endpoint", "embeddings", "--lora-modules", "a"], "--lora-modules is not allowed with"),
        (["generate", "--quantization", "awq", "x"], "argument --quantization: invalid choice: 'awq'"),
        (["generate", "--convert", "embed", "x"], "--convert embed is not supported by jaxllm yet"),
        (["serve", "--cpu-offload-gb", "2"], "--cpu-offload-gb 2 is not supported by jaxllm yet; remove it"),
        (["serve", "-pp", "0"], "--pipeline-parallel-size must be an integer from 1 to 1024, got 0"),
        (["serve", "--kv-cache-dtype=int4"], "argument --kv-cache-dtype: invalid choice: 'int4'"),
        (["serve", "--enforce-eage"], "unknown argument --enforce-eage (see"),
        (["generate", "--file", "f", "x"], "give prompts as arguments or with --file, not both"),
    ],
)
def test_wrong_usage_is_one_line_and_2(arguments: list[str], message: str, run: Run) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("jaxllm: error: ") and message in err and err.count("\n") == 1


def test_defaults_of_vllm_may_be_typed(run: Run) -> None:
    typed = ["--task", "generate", "--tokenizer-mode", "auto", "--dtype", "half"]
    code, _, err = run("generate", *typed, "--cpu-offload-gb=0", "p")
    assert (code, FakeLLM.made.settings) == (
        0,
        {"precompile": "background", "dtype": "float16"},
    ) and "warning" not in err


def test_what_changes_nothing_is_taken_with_one_warning(run: Run) -> None:
    typed = ["--trust-remote-code", "--swap-space=8", "--no-enable-chunked-prefill", "--compilation-config", "{}"]
    code, _, err = run("generate", *typed, "p")
    assert (code, FakeLLM.made.settings) == (0, {"precompile": "background"})
    said = "accepted for compatibility with vLLM, without effect in jaxllm"
    flags = "--trust-remote-code, --swap-space, --no-enable-chunked-prefill, --compilation-config"
    assert err.startswith(f"jaxllm: warning: {flags}: {said}\n") and err.count("warning") == 1
    with pytest.warns(UserWarning) as warned:
        config = EngineArgs("m", trust_remote_code=True, swap_space=8, task="generate", block_size=8)
    assert [str(one.message) for one in warned] == [f"trust_remote_code, swap_space: {said}"]
    assert replace(config, seed=3) == EngineArgs("m", block_size=8, seed=3)
    assert asdict(config) == asdict(EngineConfig(model="m", block_size=8))


def test_serve_takes_what_vllms_users_type(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr("jaxllm_server.launch.serve", lambda server: served.append(server.options) or 0)
    monkeypatch.setattr("jaxllm_server.launch.configure_logging", lambda: None)
    parser = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    assert run("serve", *parser, "--disable-log-requests", "--disable-log-stats", "-pp", "1")[0] == 0
    (server,) = served
    assert (server.tool_call_parser, server.enable_log_requests, server.log_stats_interval) == ("hermes", False, 0.0)


def test_help_begins_with_what_most_set_and_says_which_paths_need_the_key(run: Run) -> None:
    _, out, _ = run("serve", "--help")
    usual = out[: out.index("\nserver:")]
    names = "model host port grpc-port api-key served-model-name chat-template dtype quantization max-model-len"
    for name in (*names.split(), "max-num-seqs", "gpu-memory-utilization", "tensor-parallel-size"):
        assert f"--{name} " in usual and out.count(f" --{name} ") == usual.count(f" --{name} "), name
    assert len(usual.splitlines()) < 60
    said = " ".join(out.split())
    assert "every path but /health, /live, /ready, /ping, /docs and /openapi.json" in said
    assert (
        "over HTTP /metrics (Prometheus has to send it), /load, /drain and the routes that load adapters, pause, "
        in said
    )


def test_log_probabilities_without_json_are_warned_of(run: Run) -> None:
    code, out, err = run("generate", "--logprobs", "2", "--logprob-token-ids", "4", "p")
    assert (code, out) == (0, "<p>\n")
    assert err.startswith("jaxllm: warning: --logprobs, --logprob-token-ids: log-probabilities are written with --json")
    assert "warning" not in run("generate", "--json", "--logprobs", "2", "p")[2] + run("generate", "p")[2]


def test_modules_of_a_config_file_are_texts_or_objects(tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text("lora-modules: [a=b, {name: c, path: d}]\n")
    assert flags.read_config_file(str(path), []) == ["--lora-modules=a=b", '--lora-modules={"name": "c", "path": "d"}']


def test_an_unknown_key_of_a_config_file_is_told_with_the_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text("max_model_length: 5\n")
    code, _, err = run("serve", "--config", str(path))
    assert code == 2
    assert f"{path}: unknown argument --max-model-length=5; did you mean --max-model-len?" in err
    code, _, err = run("serve", "--config", str(path), "--max-model-length=5")
    assert err.startswith("jaxllm: error: unknown argument --max-model-length=5")


def test_half_is_float16() -> None:
    assert EngineArgs("m", dtype="half").dtype == "float16"
