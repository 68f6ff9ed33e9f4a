"""docs/clients.md: the features that each client can use with this server, from the outcomes of these tests.

A file of tests is a row, `test_openai.py` the first. A test's name begins with its column: `test_stream` and
`test_stream_of_an_object` are both in the cell "stream". Pure except `versions`, which reads the environment.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import NamedTuple

from tests.clients.common import NODE, aiperf
from tests.support.paths import ROOT

DOCUMENT = ROOT / "docs" / "clients.md"
BY_HAND = "## vLLM's own tests"  # the rest of the document is written by hand


HEADER = """\
# Clients

<!-- Made by `make clients`, all but the last section. Do not edit: tests/clients/table.py writes it. -->

For users of a client library: published clients that were tested with `jaxllm serve`, and the settings that they need.
`make clients` installs the unmodified clients into a separate environment, runs all tests and writes this table. Each
row has a file in `tests/clients`. A ✓ means that the tests of this column pass, for example `test_stream…` in
`test_openai.py`. A cell is empty if the client lacks the function.

- The column tools tests a call, its result, and the answer; agents send held-out questions to the embedded model's
  adapter `tools`.
- The columns Responses and Messages test text, streams and calls of `/v1/responses` and `/v1/messages`.
- The column log-probabilities includes the log-likelihoods of lm-evaluation-harness. A stream of gRPC is
  `StreamGenerate`.

Some clients need settings in addition to the address of the server:

- The base URL ends with `/v1` for OpenAI's clients and Vercel's `@ai-sdk/anthropic`. It does not for Anthropic's
  clients, nor for `/v1/messages` with LangChain and LiteLLM.
- LangChain's `OpenAIEmbeddings` needs `check_embedding_ctx_length=False`; otherwise it sends token ids of OpenAI's
  vocabulary.
- LlamaIndex needs `OpenAILike` with `is_function_calling_model=True`; otherwise its agents write calls into the prompt.
- DSPy requests JSON by a schema only for model names in its list; `--served-model-name` can add such a name.
- `local-completions` of lm-evaluation-harness takes the server's tokenizer with `--enable-tokenizer-info-endpoint`;
  otherwise it looks for one on the model hub.
- Pydantic AI with `/v1/messages` is not in the table, because its release 2.31 fails with release 2 of `anthropic`.

""".splitlines()


class Client(NamedTuple):
    """A row: its display name, and its packages, the main one first."""

    name: str
    packages: tuple[str, ...]


# By the file of their tests. Packages of npm begin with "npm:".
CLIENTS: dict[str, Client] = {
    "test_openai": Client("OpenAI, Python", ("openai",)),
    "test_openai_node": Client("OpenAI, JavaScript", ("npm:openai",)),
    "test_openai_agents": Client("OpenAI Agents SDK", ("openai-agents",)),
    "test_anthropic": Client("Anthropic, Python", ("anthropic",)),
    "test_anthropic_node": Client("Anthropic, JavaScript", ("npm:@anthropic-ai/sdk",)),
    "test_langchain": Client("LangChain", ("langchain", "langchain-openai", "langchain-anthropic")),
    "test_llama_index": Client(
        "LlamaIndex", ("llama-index-core", "llama-index-llms-openai-like", "llama-index-embeddings-openai")
    ),
    "test_pydantic_ai": Client("Pydantic AI", ("pydantic-ai-slim",)),
    "test_instructor": Client("Instructor", ("instructor",)),
    "test_litellm": Client("LiteLLM", ("litellm",)),
    "test_dspy": Client("DSPy", ("dspy",)),
    "test_smolagents": Client("smolagents", ("smolagents",)),
    "test_vercel": Client(
        "Vercel AI SDK", ("npm:ai", "npm:@ai-sdk/openai-compatible", "npm:@ai-sdk/openai", "npm:@ai-sdk/anthropic")
    ),
    "test_lm_eval": Client("lm-evaluation-harness", ("lm-eval",)),
    "test_aiperf": Client("AIPerf", ("aiperf",)),
    "test_cohere": Client("Cohere", ("cohere",)),
    "test_ollama": Client("Ollama, Python", ("ollama",)),
    "test_grpc_js": Client("gRPC, JavaScript", ("npm:@grpc/grpc-js",)),
}
MODULES = tuple(CLIENTS)
# Columns, by the prefix of their tests' names.
FEATURES: dict[str, str] = {
    "test_chat": "chat",
    "test_stream": "stream",
    "test_tools": "tools",
    "test_structured": "structured output",
    "test_logprobs": "log-probabilities",
    "test_embeddings": "embeddings, ranks",
    "test_responses": "Responses",
    "test_messages": "Messages",
}
# Required by the tests, not clients.
HELPERS = frozenset({"faiss-cpu", "beartype", "safetensors", "pytest", "npm:@grpc/proto-loader", "npm:zod"})


def feature_of(test: str) -> str:
    """Return the column of a test by the name of its function.

    >>> feature_of("test_stream_of_an_object")
    'stream'
    """
    (found,) = (feature for start, feature in FEATURES.items() if f"{test}_".startswith(f"{start}_"))
    return found


def packages() -> list[str]:
    """Return every package in `CLIENTS`."""
    return [package for client in CLIENTS.values() for package in client.packages]


def versions() -> dict[str, str]:
    """Return the version of every installed package."""
    return {package: _version(package) for package in packages()}


def _version(package: str) -> str:
    if package.startswith("npm:"):
        file = NODE / "node_modules" / package.removeprefix("npm:") / "package.json"
        return json.loads(file.read_text())["version"]
    return aiperf("--version").split()[-1] if package == "aiperf" else version(package)


def render(outcomes: Mapping[tuple[str, str], Iterable[bool]], versions: Mapping[str, str], before: str) -> str:
    """Return the document; `outcomes` lists, by file stem and column, whether each test passed.

    The section written by hand is copied from `before`, the previous document.
    """
    rows = [("client", *FEATURES.values())]
    for module, client in CLIENTS.items():
        cells = [outcomes.get((module, feature)) for feature in FEATURES.values()]
        rows.append((client.name, *("" if cell is None else "✓" if all(cell) else "**fails**" for cell in cells)))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, f"|{' --- |' * len(rows[0])}")
    tried = [
        f"- {client.name}: " + ", ".join(f"{each.removeprefix('npm:')} {versions[each]}" for each in client.packages)
        for client in CLIENTS.values()
    ]
    made = "\n".join([*HEADER, *lines, "", "Versions of this table:", "", *tried, ""])
    return "\n".join((made, BY_HAND + before.partition(BY_HAND)[2]))
