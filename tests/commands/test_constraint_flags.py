"""Flags that constrain the output: each sets its sampling parameter, and at most one is allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm.commands import bench_serve_flags
from jaxllm.commands.constraint_flags import schema_of
from jaxllm.errors import UserError
from jaxllm.structured_outputs_params import StructuredOutputsParams
from tests.support.fake_llm import FakeLLM, Run, seen_params

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GRAMMAR = 'start: "a"\n'


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("schema.json").write_text(json.dumps(SCHEMA))
    Path("grammar.lark").write_text(GRAMMAR)
    Path("list.json").write_text("[1]")
    Path("broken.json").write_text("{")
    Path("deep.json").write_text('{"a": ' * 100_000)
    Path("latin").write_bytes(b"\xe9")
    Path("empty").write_text("")


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("flags", "constraint"),
    [
        (["--json-schema", "schema.json"], {"json": SCHEMA}),
        (["--json-object"], {"json_object": True}),
        (["--regex", "[a-z]+"], {"regex": "[a-z]+"}),
        (["--choice", "yes", "--choice=no"], {"choice": ["yes", "no"]}),
        (["--grammar", "grammar.lark"], {"grammar": GRAMMAR}),
        ([], None),
    ],
)
def test_a_flag_is_a_form_of_the_output(command: str, flags: list[str], constraint: Any, run: Run, files: None) -> None:
    code, _, err = run(command, *flags, *(["p"] if command == "generate" else []), stdin="Hi\n")
    assert code == 0, err
    wanted = None if constraint is None else StructuredOutputsParams(**constraint)
    assert [params.structured_outputs for params in seen_params()] == [wanted]


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("flags", "message", "code"),
    [
        (["--json-object", "--regex", "a"], "--json-object and --regex exclude each other: give one of them", 2),
        (["--regex", ""], "--regex: regex must be a text that is not empty", 2),
        (["--choice", ""], "--choice: choice must hold texts that are not empty.", 2),
        (["--grammar", "empty"], "--grammar: grammar must be a text that is not empty", 2),
        (["--json-schema", "missing.json"], "missing.json", 1),
        (["--json-schema", "list.json"], "list.json holds no JSON schema: a JSON schema is an object.", 1),
        (["--json-schema", "broken.json"], "broken.json holds no JSON schema: Expecting property name", 1),
        (["--json-schema", "deep.json"], "deep.json holds no JSON schema", 1),
        (["--json-schema", "latin"], "latin is not UTF-8 text", 1),
        (["--grammar", "latin"], "latin is not UTF-8 text", 1),
        (["--grammar", "missing"], "missing", 1),
    ],
)
def test_what_is_wrong_is_told_in_a_line_before_a_model_is_loaded(
    command: str, flags: list[str], message: str, code: int, run: Run, files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLLM, "__init__", lambda *_, **__: pytest.fail("loaded"))
    ended, out, err = run(command, *flags, *(["p"] if command == "generate" else []), stdin="Hi\n")
    assert (ended, out) == (code, "")
    assert err.startswith("jaxllm: error: ") and message in err and err.count("\n") == 1


def test_every_request_of_a_load_has_the_schema(files: None) -> None:
    options = dict.fromkeys((*bench_serve_flags.SAMPLING, "logprobs", "ignore_eos", "embeds"))
    options["json_schema_path"] = "schema.json"
    assert not bench_serve_flags.ignores_eos(options, "random")  # the schema ends the answer
    assert bench_serve_flags.ignores_eos(options | {"json_schema_path": None}, "random")
    form = {"type": "json_schema", "json_schema": {"name": "bench", "schema": SCHEMA}}
    for backend in ("openai", "openai-chat"):
        assert bench_serve_flags.fields_of(options | {"backend": backend}, False) == {"response_format": form}
    (sent,) = bench_serve_flags.fields_of(options | {"backend": "grpc"}, False).values()
    assert StructuredOutputsParams(**sent) == schema_of("schema.json") == StructuredOutputsParams(json=SCHEMA)
    with pytest.raises(UserError, match=r"list\.json holds no JSON schema"):
        schema_of("list.json")
