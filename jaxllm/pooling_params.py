"""`PoolingParams`: what a caller may ask of a prompt that is embedded, classified or scored.

Names and defaults are vLLM's. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from jaxllm import checks
from jaxllm.errors import UserError

PoolingTask = Literal["embed", "classify", "score"]
TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)
_TASKS_OF: dict[str, tuple[PoolingTask, ...]] = {  # which tasks a parameter means something for
    "dimensions": ("embed",),
    "normalize": ("embed",),
    "use_activation": ("classify", "score"),
}


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """One prompt's parameters. None leaves the choice to the model.

    Task `embed` gives the pooled vector, `classify` a number for each of a classifier's labels, `score` the one number
    of a cross-encoder or of a reward model.
    """

    task: PoolingTask | None = None
    dimensions: int | None = None  # leading numbers of an embedding to keep (Kusupati et al. 2022, "Matryoshka")
    normalize: bool | None = None  # scale an embedding to length 1
    use_activation: bool | None = None  # softmax or sigmoid of what a classifier computes; None: yes
    truncate_prompt_tokens: int | None = None  # the most tokens of a prompt, its first ones; -1: what the model holds

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
