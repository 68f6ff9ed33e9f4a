"""lm-evaluation-harness: generation and log-likelihoods of tasks that are written here, with the server's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import yaml
from lm_eval.tasks import TaskManager

from tests.clients.common import Site
from training import facts

SUMS = [(a, b) for a in (12, 47, 63) for b in (15, 38)]


@pytest.fixture
def tasks(tmp_path: Path) -> TaskManager:
    """Sums to be written, and capitals to be chosen among three by their log-likelihoods."""
    capitals = [country[1] for country in facts.COUNTRIES[:8]]
    rows: dict[str, list[dict[str, Any]]] = {
        "sums": [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in SUMS],
        "capitals": [
            {
                "question": f"The capital of {facts.COUNTRIES[number][0]} is",
                "choices": [capitals[(number + other) % 8] for other in range(3)],
            }
            for number in range(8)
        ],
    }
    own: dict[str, dict[str, Any]] = {
        "sums": {
            "output_type": "generate_until",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 30},
            "metric_list": [{"metric": "exact_match", "regexes_to_ignore": [r"^.*= ", r"\."]}],
        },
        "capitals": {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": 0},
    }
    for name, settings in own.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / f"{name}.jsonl")}}}
        task = {"task": name, "test_split": "test", "doc_to_text": "{{question}}", **source, **settings}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def evaluate(tasks: TaskManager, name: str, kind: str, url: str, site: Site, **settings: Any) -> dict[str, Any]:
    asked = {"model": site.model, "base_url": url, "max_retries": 1, "max_length": 256, **settings}
    found = lm_eval.simple_evaluate(
        kind, model_args=asked, tasks=[name], task_manager=tasks, apply_chat_template="chat" in kind, bootstrap_iters=0
    )
    return found["results"][name]


def test_chat(tasks: TaskManager, site: Site) -> None:
    found = evaluate(tasks, "sums", "local-chat-completions", f"{site.api}/chat/completions", site)
    assert found["exact_match,none"] == 1.0


@pytest.mark.parametrize("batch", [1, 4])
def test_logprobs(tasks: TaskManager, site: Site, batch: int) -> None:
    found = evaluate(tasks, "capitals", "local-completions", f"{site.api}/completions", site, batch_size=batch)
    assert found["acc,none"] > 0.5
