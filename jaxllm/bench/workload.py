"""`Job`, a request of a benchmark, and `DatasetOptions`, which select prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from jaxllm.errors import UserError
from jaxllm.setting import setting
from jaxllm.structured_outputs_params import StructuredOutputsParams

DatasetName = Literal["random", "sharegpt", "sonnet", "prefix_repetition", "custom", "timed_trace"]


@dataclass(frozen=True, slots=True)
class Job:
    """One request: prompt, its length, and output length.

    `prompt_tokens` includes special tokens of the server. `others` are further prompts to embed. `model` is an adapter,
    or "".
    """

    prompt: str | tuple[int, ...]
    prompt_tokens: int
    max_tokens: int
    arrival_s: float | None = None
    structured_outputs: StructuredOutputsParams | None = None
    others: tuple[str | tuple[int, ...], ...] = ()
    model: str = ""


def to_embed(jobs: Sequence[Job], batch_size: int) -> list[Job]:
    batches = [jobs[at : at + batch_size] for at in range(0, len(jobs), batch_size)]
    return [
        replace(
            batch[0],
            prompt_tokens=sum(job.prompt_tokens for job in batch),
            max_tokens=0,
            others=tuple(job.prompt for job in batch[1:]),
        )
        for batch in batches
    ]


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """The dataset and its settings, as flags."""

    dataset_name: DatasetName = setting("random", "source of the prompts (default: random)")
    dataset_path: str | None = setting(
        None, "file of the dataset: JSON of ShareGPT, lines of a poem, or JSON lines of prompts or of a trace", "FILE"
    )
    num_prompts: int = setting(1000, "number of requests")
    seed: int = setting(0, "seed of prompts, lengths and arrivals")
    input_len: int | None = setting(None, "tokens of a prompt, for any dataset")
    output_len: int | None = setting(None, "tokens of an answer, for any dataset")
    disable_shuffle: bool = setting(False, "keep the order of the file")
    no_oversample: bool = setting(False, "do not repeat prompts if the file has fewer than --num-prompts")
    random_input_len: int = setting(1024, "tokens of a prompt after the prefix")
    random_output_len: int = setting(128, "tokens of an answer")
    random_range_ratio: float = setting(0.0, "lengths vary by up to this share, up and down")
    random_prefix_len: int = setting(0, "tokens that all prompts begin with")
    sharegpt_output_len: int | None = setting(None, "tokens of an answer (default: as in the file)")
    sonnet_input_len: int = setting(550, "maximum tokens of a prompt")
    sonnet_output_len: int = setting(150, "tokens of an answer")
    sonnet_prefix_len: int = setting(200, "tokens that all prompts begin with")
    prefix_repetition_prefix_len: int = setting(256, "tokens of a prefix")
    prefix_repetition_suffix_len: int = setting(256, "tokens after the prefix")
    prefix_repetition_num_prefixes: int = setting(10, "different prefixes")
    prefix_repetition_output_len: int = setting(128, "tokens of an answer")
    custom_output_len: int = setting(256, "tokens of an answer where a line has no output_tokens")
    timed_trace_unit: Literal["ms", "s"] = setting("ms", "unit of timestamps (default: ms, as in Mooncake's traces)")
    timed_trace_block_size: int = setting(512, "tokens per hash id")

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("seed", "random_prefix_len", "sonnet_prefix_len") else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                raise UserError(f"{field.name} must be at least {least}, got {value}.")
        for name, value, known in (
            ("dataset_name", self.dataset_name, get_args(DatasetName)),
            ("timed_trace_unit", self.timed_trace_unit, ("ms", "s")),
        ):
            if value not in known:
                raise UserError(f"{name} must be one of {', '.join(known)}, got {value!r}.")
        if not 0 <= self.random_range_ratio < 1:
            raise UserError(f"random_range_ratio must be in [0, 1), got {self.random_range_ratio}.")
        if self.dataset_path is None and self.dataset_name in ("sharegpt", "custom", "timed_trace"):
            raise UserError(f"dataset_path is required for dataset_name={self.dataset_name}.")
        if self.dataset_path is not None and self.dataset_name in ("random", "prefix_repetition"):
            raise UserError(
                f"dataset_path is not allowed with dataset_name={self.dataset_name}; choose another dataset_name."
            )
        for name, without in (("input_len", ("sharegpt", "custom", "timed_trace")), ("output_len", ("timed_trace",))):
            if getattr(self, name) is not None and self.dataset_name in without:
                raise UserError(f"{name} is not allowed with dataset_name={self.dataset_name}, whose file sets it.")
