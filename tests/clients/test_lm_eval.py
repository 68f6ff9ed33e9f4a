"""lm-evaluation-harness: generation and log-likelihoods of tasks defined here, with the server's tokenizer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import yaml
from lm_eval.tasks import TaskManager

from tests.clients.common import Site, post
from training import facts

STORIES = [f"Once upon a time there was a {animal}. It was happy." for animal in ("dog", "cat", "bird")]
SUMS = [(a, b) for a in (12, 47, 63) for b in (15, 38)]


@pytest.fixture
def tasks(tmp_path: Path) -> TaskManager:
    """Return tasks: sums to generate, capitals to choose by log-likelihood, and texts to score."""
    capitals = [country[1] for country in facts.COUNTRIES[:8]]
    rows: dict[str, list[dict[str, Any]]] = {
        "sums": [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in SUMS],
        "stories": [{"text": text} for text in STORIES],
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
        "stories": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}],
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


def test_logprobs_of_whole_texts(tasks: TaskManager, site: Site) -> None:
    begin = {"custom_prefix_token_id": 0}  # <|endoftext|>; by default it treats 0 as unset, and uses another token
    found = evaluate(tasks, "stories", "local-completions", f"{site.api}/completions", site, **begin)
    asked: Any = {"model": site.model, "echo": True, "max_tokens": 0, "logprobs": 0}
    told = [post(f"{site.api}/completions", **asked, prompt=f"<|endoftext|>{text}") for text in STORIES]
    total = sum(sum(answer["choices"][0]["logprobs"]["token_logprobs"][1:]) for answer in told)
    words = sum(len(text.split()) for text in STORIES)
    assert found["word_perplexity,none"] == pytest.approx(math.exp(-total / words), rel=1e-3)
