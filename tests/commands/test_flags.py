"""Flags: each reaches its place, and what is wrong with one is told in a line."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from jaxllm.commands import flags
from jaxllm.config import EngineArgs, EngineConfig
from jaxllm.sampling_params import SamplingParams
from tests.support.fake_llm import FakeLLM, Run, seen_params


def test_every_field_is_a_flag_that_reaches_its_place(run: Run) -> None:
    given = {
        "--tokenizer": "t", "--revision": "r", "--dtype": "float32", "--device": "cpu",
        "--quantization": "int8", "--kv-cache-dtype": "fp8_e4m3", "--engine-seed": "-3",
        "--max-model-len": "4K", "--block-size": "32", "--max-num-batched-tokens": "2k", "--max-num-seqs": "8",
        "--tensor-parallel-size": "2", "--data-parallel-size": "3", "--gpu-memory-utilization": "0.5",
        "--kv-cache-memory-bytes": "1G",
        "--num-kv-blocks": "9", "--scheduling-policy": "priority", "--max-logprobs": "7", "--load-format": "dummy",
        "--precompile": "all", "--compilation-cache-dir": "c", "--compilation-cache-bytes": "1G",
        "--n": "2", "--presence-penalty": "0.5", "--frequency-penalty": "-0.5", "--repetition-penalty": "1.5",
        "--temperature": "0.9", "--top-p": "0.8", "--top-k": "5", "--min-p": "0.1", "--seed": "11", "--stop": "x",
        "--stop-token-ids": "3", "--max-tokens": "9", "--min-tokens": "1", "--logprobs": "2",
        "--truncate-prompt-tokens": "1k", "--prompt-logprobs": "3", "--logprob-token-ids": "4",
        "--allowed-token-ids": "5", "--bad-words": "w", "--logits-processors": "module:function",
        "--max-loras": "3", "--max-lora-rank": "8", "--max-cpu-loras": "5",
        "--kernels": "sample=xla", "--runner": "pooling", "--pooler-config": '{"pooling_type": "MEAN"}',
        "--speculative-config": '{"method": "ngram", "num_speculative_tokens": 4}',
    }  # fmt: skip
    switches = [
        "--no-enable-prefix-caching", "--no-async-scheduling", "--enable-kv-cache-events", "--deterministic",
        "--stop=--y", "--skip-tokenizer-init", "--enable-lora",
    ]  # fmt: skip
    with_help = [own for own in fields(SamplingParams) if own.metadata["help"] is not None]
    opposite = {own.name: own.default is False for own in with_help if str(own.type).startswith("bool")}
    switches += [flags.flag_of(name if on else f"no_{name}", SamplingParams) for name, on in opposite.items()]
    code, _, _ = run("generate", "-m", "m", *(part for pair in given.items() for part in pair), *switches, "--", "p")
    assert code == 0
    assert EngineConfig(model="m", **FakeLLM.made.settings) == EngineConfig(
        model="m", tokenizer="t", revision="r", dtype="float32", device="cpu", seed=-3, max_model_len=4096,
        quantization="int8", kv_cache_dtype="fp8_e4m3", block_size=32, enable_prefix_caching=False, deterministic=True,
        async_scheduling=False, enable_kv_cache_events=True, max_num_batched_tokens=2000, max_num_seqs=8,
        tensor_parallel_size=2, data_parallel_size=3, gpu_memory_utilization=0.5,
        kv_cache_memory_bytes=2**30, num_kv_blocks=9,
        scheduling_policy="priority", max_logprobs=7, load_format="dummy", precompile="all",
        compilation_cache_dir="c", compilation_cache_bytes=2**30,
        logits_processors=("module:function",), kernels=("sample=xla",),
        enable_lora=True, max_loras=3, max_lora_rank=8, max_cpu_loras=5,
        skip_tokenizer_init=True, runner="pooling", pooler_config={"pooling_type": "MEAN"},
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
    )  # fmt: skip
    assert seen_params() == [
        SamplingParams(
            n=2, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.5, temperature=0.9, top_p=0.8,
            top_k=5, min_p=0.1, seed=11, stop=["x", "--y"], stop_token_ids=[3], max_tokens=9,
            min_tokens=1, logprobs=2, truncate_prompt_tokens=1000, prompt_logprobs=3, logprob_token_ids=[4],
            allowed_token_ids=[5], bad_words=["w"], **opposite,
        )
    ]  # fmt: skip
    num_fields = len(fields(EngineConfig)) - 1 + len(with_help)
    assert num_fields == len(given) + len(switches) - 1  # --stop is there twice


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
        (["bench", "serve", "--endpoint", "embeddings", "--lora-modules", "a"], "--lora-modules: nothing is generated"),
        (["generate", "--quantization", "awq", "x"], "argument --quantization: invalid choice: 'awq'"),
        (["generate", "--convert", "embed", "x"], "--convert embed is not supported by jaxllm yet"),
        (["serve", "-pp", "2"], "-pp 2 is not supported by jaxllm yet; leave it out"),
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
    typed = ["--task", "generate", "--pipeline-parallel-size", "1", "--dtype", "half"]
    code, _, err = run("generate", *typed, "--cpu-offload-gb=0", "p")
    assert (code, FakeLLM.made.settings) == (
        0,
        {"precompile": "background", "dtype": "float16"},
    ) and "warning" not in err


def test_what_changes_nothing_is_taken_with_one_warning(run: Run) -> None:
    typed = ["--trust-remote-code", "--swap-space=8", "--no-enable-chunked-prefill", "--compilation-config", "{}"]
    code, _, err = run("generate", *typed, "p")
    assert (code, FakeLLM.made.settings) == (0, {"precompile": "background"})
    said = "taken for the sake of vLLM's users, without effect in jaxllm"
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
    assert "/metrics (Prometheus has to send it), /load and the routes of adapters over HTTP, gRPC's control" in said


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
