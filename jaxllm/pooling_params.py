"""`PoolingParams`: parameters of embedding, classification and scoring, with vLLM's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from jaxllm import checks
from jaxllm.errors import UserError
from jaxllm.request_params import RequestParams

PoolingTask = Literal["embed", "classify", "score"]
TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)
_TASKS_OF: dict[str, tuple[PoolingTask, ...]] = {
    "dimensions": ("embed",),
    "normalize": ("embed",),
    "use_activation": ("classify", "score"),
}


@dataclass(frozen=True, kw_only=True)
class PoolingParams(RequestParams):
    """Parameters for one prompt; None selects the model's default.

    `embed` returns the pooled vector, `classify` a number per label, `score` the output of a cross-encoder or reward
    model.
    """

    generates: ClassVar[bool] = False

    task: PoolingTask | None = None
    dimensions: int | None = None  # leading numbers to keep (Kusupati et al. 2022, "Matryoshka")
    normalize: bool | None = None  # to length 1
    use_activation: bool | None = None  # a classifier's softmax or sigmoid; None: yes
    truncate_prompt_tokens: int | None = None  # leading tokens to keep; -1: the model's length

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in TASKS:
            message = f"task must be one of {', '.join(TASKS)}, got {checks.shown(self.task)}."
            raise UserError(message, "task", self.task)
        for name in ("normalize", "use_activation"):
            if getattr(self, name) is not None:
                checks.flag(name, getattr(self, name))
        if self.dimensions is not None:
            object.__setattr__(self, "dimensions", checks.integer("dimensions", self.dimensions, 1))
        kept = self.truncate_prompt_tokens
        if kept is not None and checks.integer("truncate_prompt_tokens", kept, -1) == 0:
            message = "truncate_prompt_tokens must be -1 or at least 1, got 0."
            raise UserError(message, "truncate_prompt_tokens", kept)
        for name, tasks in _TASKS_OF.items():
            if getattr(self, name) is not None and self.task is not None and self.task not in tasks:
                message = f"task {self.task!r} has no {name}: it belongs to {' and '.join(tasks)}."
                raise UserError(message, name, getattr(self, name))
