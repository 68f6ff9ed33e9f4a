"""Workloads of benchmarks: lengths, seeds, invalid files, rates; and the environment in a result."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from jaxllm.bench import environment
from jaxllm.bench.arrivals import arrival_times, ramped_times
from jaxllm.bench.datasets import DATASETS, make_jobs
from jaxllm.bench.workload import DatasetName, DatasetOptions
from jaxllm.commands import bench_workload, cli
from jaxllm.commands.arguments import UsageError
from jaxllm.commands.flags import add_flags
from jaxllm.embedded import MODEL_DIR
from jaxllm.errors import UserError
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL_DIR)


def write(path: Path, *records: Any) -> str:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


# ---- datasets


@pytest.mark.parametrize("as_text", [True, False])
def test_random_prompts_have_the_lengths_asked_for_and_one_prefix(as_text: bool, tokenizer: Tokenizer) -> None:
    options = DatasetOptions(
        num_prompts=40, random_input_len=100, random_output_len=10, random_range_ratio=0.3, random_prefix_len=20
    )
    jobs = make_jobs(options, tokenizer, as_text)
    assert all(90 <= job.prompt_tokens <= 150 and 7 <= job.max_tokens <= 13 for job in jobs)
    assert len({job.prompt_tokens for job in jobs}) > 15 and len({job.max_tokens for job in jobs}) > 4
    for job in jobs:
        ids = tokenizer.encode(job.prompt) if isinstance(job.prompt, str) else list(job.prompt)
        assert len(ids) == job.prompt_tokens and not set(ids[1:]) & tokenizer.special_ids
    starts = {tuple(job.prompt[:20]) for job in jobs}
    assert len(starts) == 1 and len({job.prompt for job in jobs}) == 40


@pytest.mark.parametrize("name", ["random", "sonnet", "prefix_repetition"])
def test_a_seed_makes_the_same_jobs(name: str, tokenizer: Tokenizer) -> None:
    made = [
        make_jobs(DatasetOptions(dataset_name=name, num_prompts=5, seed=seed), tokenizer, True) for seed in (3, 3, 4)
    ]
    assert made[0] == made[1] != made[2]


def test_input_len_and_output_len_are_those_of_the_dataset(tokenizer: Tokenizer) -> None:
    for name in ("random", "prefix_repetition"):
        options = DatasetOptions(dataset_name=name, num_prompts=3, input_len=300, output_len=7)
        assert {(job.prompt_tokens, job.max_tokens) for job in make_jobs(options, tokenizer, True)} == {(300, 7)}
    sonnet = make_jobs(
        DatasetOptions(dataset_name="sonnet", num_prompts=30, input_len=300, output_len=7), tokenizer, True
    )
    assert all(270 <= job.prompt_tokens <= 300 and job.max_tokens == 7 for job in sonnet)


def test_sonnets_begin_with_the_same_lines(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "poem.txt").write_text("".join(f"The cat saw {number} birds today.\n" for number in range(50)))
    options = DatasetOptions(dataset_name="sonnet", dataset_path=str(tmp_path / "poem.txt"), num_prompts=4)
    prompts = [str(job.prompt) for job in make_jobs(options, tokenizer, True)]
    shared = [
        lines[0] for lines in zip(*(prompt.splitlines() for prompt in prompts), strict=False) if len({*lines}) == 1
    ]
    assert 150 <= len(tokenizer.encode("\n".join(shared))) <= 260
    assert len({*prompts}) == 4


def test_prefixes_are_used_equally_often(tokenizer: Tokenizer) -> None:
    options = DatasetOptions(dataset_name="prefix_repetition", num_prompts=30)
    jobs = make_jobs(options, tokenizer, False)
    assert sorted(Counter(job.prompt[:256] for job in jobs).values()) == [3] * 10
    assert len({job.prompt for job in jobs}) == 30


def test_sharegpt_is_pruned_as_in_vllm(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def talk(*texts: str) -> dict[str, Any]:
        return {"conversations": [{"value": text} for text in texts]}

    word = "cat "
    kept = talk("The cat sat on the mat", "and then it slept for a while")
    dropped = [
        talk("Hi", word * 9),
        talk(word * 9, "a"),
        talk(word * 1100, word * 9),
        talk(word * 900, word * 1300),
        talk(word * 9),
    ]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([*dropped, kept]))
    options = DatasetOptions(dataset_name="sharegpt", dataset_path=str(path), num_prompts=3)
    jobs = make_jobs(options, tokenizer, True)
    answer = tokenizer.encode("and then it slept for a while", add_special_tokens=False)
    assert [(job.prompt, job.max_tokens) for job in jobs] == [("The cat sat on the mat", len(answer))] * 3
    alone = DatasetOptions(
        dataset_name="sharegpt", dataset_path=str(path), num_prompts=9, no_oversample=True, sharegpt_output_len=5
    )
    short = make_jobs(alone, tokenizer, False)  # the lengths of the file's answers have no effect
    assert [job.max_tokens for job in short] == [5] * 3
    assert max(job.prompt_tokens for job in short) <= 1024


def test_custom_prompts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", {"prompt": "The cat"}, {"prompt": "A dog", "output_tokens": 3})
    options = DatasetOptions(dataset_name="custom", dataset_path=path, num_prompts=2, disable_shuffle=True)
    jobs = make_jobs(options, tokenizer, True)
    assert [(job.prompt, job.max_tokens) for job in jobs] == [("The cat", 256), ("A dog", 3)]
    assert jobs[0].prompt_tokens == len(tokenizer.encode("The cat"))


@pytest.mark.parametrize("as_text", [True, False])
def test_a_trace_keeps_its_times_and_what_its_prompts_share(
    as_text: bool, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    def line(timestamp: int, length: int, *hashes: int) -> dict[str, Any]:
        return {"timestamp": timestamp, "input_length": length, "output_length": 4, "hash_ids": list(hashes)}

    path = write(tmp_path / "trace.jsonl", line(2000, 46, 7, 8, 9), line(2000, 44, 7, 8, 10), line(3500, 30, 8, 7))
    options = DatasetOptions(dataset_name="timed_trace", dataset_path=path, timed_trace_block_size=16)
    jobs = make_jobs(options, tokenizer, as_text)
    assert [(job.arrival_s, job.prompt_tokens, job.max_tokens) for job in jobs] == [
        (0, 46, 4),
        (0, 44, 4),
        (1.5, 30, 4),
    ]
    ids = [tokenizer.encode(job.prompt) if isinstance(job.prompt, str) else list(job.prompt) for job in jobs]
    start = len(tokenizer.encode("")) if as_text else 0
    assert ids[0][: 31 - start] == ids[1][: 31 - start] and ids[0][33:] != ids[1][33:]
    assert ids[2][:10] != ids[0][:10]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("sharegpt", "{", "Expecting"),
        ("sharegpt", "{}", "expected a JSON list"),
        ("sharegpt", "[{}]", 'record 0 has no list "conversations"'),
        ("sharegpt", '[{"conversations": [1, 2]}]', 'a turn of record 0 has no text "value"'),
        ("sharegpt", "[]", "has no usable prompt"),
        ("custom", '{"prompt": "a"}\n{', "line 2: Expecting"),
        ("custom", "[1]", "line 1: expected a JSON object"),
        ("custom", '\n{"text": "a"}', 'line 2: expected an object with a text "prompt"'),
        (
            "custom",
            '{"prompt": "a", "output_tokens": 0}',
            "line 1: output_tokens must be a whole number above 0, got 0",
        ),
        ("custom", "", "has no usable prompt"),
        ("timed_trace", "", "has no requests"),
        (
            "timed_trace",
            '{"timestamp": -1, "input_length": 1, "output_length": 1}',
            "timestamp must be a number not below 0",
        ),
        ("timed_trace", '{"timestamp": 1, "input_length": 1.5, "output_length": 1}', "input_length must be a number"),
        (
            "timed_trace",
            "\n".join(f'{{"timestamp": {when}, "input_length": 1, "output_length": 1}}' for when in (2, 1)),
            "line 2: its timestamp is before",
        ),
        ("sonnet", " \n", "has no lines of text"),
    ],
)
def test_bad_files_are_told_in_one_line(
    name: str, content: str, message: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        make_jobs(DatasetOptions(dataset_name=name, dataset_path=str(path)), tokenizer, True)
    assert str(path) in str(caught.value) and message in str(caught.value) and "\n" not in str(caught.value)


# ---- flags


def test_every_field_of_the_dataset_has_a_flag() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, DatasetOptions)
    flags = [action.option_strings for action in parser._actions[1:]]
    assert flags == [["--" + field.name.replace("_", "-")] for field in fields(DatasetOptions)]
    assert get_args(DatasetName) == tuple(DATASETS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"random_input_len": 0}, "--random-input-len must be at least 1"),
        ({"random_range_ratio": 1.0}, "--random-range-ratio must be in [0, 1)"),
        ({"sonnet_input_len": 5}, "--sonnet-input-len requires --dataset-name sonnet, got random"),
        ({"dataset_name": "sharegpt"}, "--dataset-path is required"),
        ({"dataset_path": "x"}, "--dataset-path is not allowed with --dataset-name=random; choose another"),
        ({"dataset_name": "custom", "dataset_path": "x", "input_len": 3}, "--input-len is not allowed"),
        ({"seed": -1}, "--seed must be at least 0"),
    ],
)
def test_wrong_flags_of_a_dataset(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match="^" + message.replace("[", r"\[").replace(")", r"\)")):
        bench_workload.dataset_options({f"DatasetOptions.{name}": value for name, value in given.items()})


def test_a_benchmark_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 2 and cli.main(["bench", "nothing"]) == 2
    assert capsys.readouterr().err.count("(see jaxllm") == 2


# ---- arrivals


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 20.0, math.inf])
def test_arrivals_take_as_long_as_the_rate_says(burstiness: float) -> None:
    times = arrival_times(400, 8.0, burstiness)
    assert times[-1] == pytest.approx(50.0) and (np.diff(times) >= 0).all() and times[0] > 0
    gaps = np.diff(times)
    spread = gaps.std() / gaps.mean()  # for a Gamma distribution: 1 / sqrt(shape)
    assert spread == pytest.approx(1 / math.sqrt(burstiness), rel=0.2, abs=1e-9)


def test_arrivals_without_a_rate_come_at_once_and_a_seed_repeats_them() -> None:
    assert not arrival_times(5, math.inf).any()
    first, again, other = (arrival_times(9, 1.0, seed=seed) for seed in (1, 1, 2))
    assert (first == again).all() and (first != other).any()


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_goes_from_one_rate_to_the_other(strategy: Any) -> None:
    times = ramped_times(1000, 2.0, 32.0, strategy, burstiness=math.inf)
    gaps = np.diff(times, prepend=0.0)
    assert 1 / gaps[0] == pytest.approx(2.0) and 1 / gaps[-1] == pytest.approx(32.0, rel=0.02)
    assert 1 / gaps[500] == pytest.approx(17.0 if strategy == "linear" else 8.0)
    drawn = ramped_times(1000, 2.0, 32.0, strategy)
    assert drawn[-1] == pytest.approx(times[-1], rel=0.15)
    assert math.isfinite(ramped_times(10, 0.0, 1.0, "linear")[-1])


@pytest.mark.parametrize("arguments", [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0)])
def test_rates_that_are_none(arguments: tuple[float, float]) -> None:
    with pytest.raises(UserError, match="must be above 0"):
        arrival_times(3, *arguments)


@pytest.mark.parametrize("ends", [(0.0, 1.0), (3.0, 2.0), (1.0, math.inf)])
def test_ramps_that_are_none(ends: tuple[float, float]) -> None:
    with pytest.raises(UserError, match="ramp needs a start"):
        ramped_times(3, *ends, "exponential")


# ---- environment


def test_a_result_says_where_it_was_made_and_no_secret() -> None:
    command = [
        *("bench", "--header", "Authorization=Bearer KEY", "--seed", "1", "--api-key=KEY", "--header"),
        *("a=KEY", "b=KEY"),
    ]
    described = environment.describe(command)
    assert json.loads(json.dumps(described)) == described
    assert described["cpus"] >= 1 and described["packages"]["jax"] and described["date"].endswith("Z")
    assert described["command"] == ["bench", "--header", "…", "--seed", "1", "--api-key=…", "--header", "…", "…"]


def test_the_commit_says_whether_the_code_was_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert environment.commit(tmp_path) is None
    git("init", "-q")
    (tmp_path / "__init__.py").write_text("one = 1\n")
    assert environment.commit(tmp_path) is None, "a folder inside another checkout"
    git("add", "-A")
    git("commit", "-qm", "one")
    assert environment.commit(tmp_path) == git("rev-parse", "--short=12", "HEAD")
    (tmp_path / "__init__.py").write_text("one = 2\n")
    assert str(environment.commit(tmp_path)).endswith("-dirty")
