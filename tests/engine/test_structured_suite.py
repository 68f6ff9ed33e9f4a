"""The JSON-Schema-Test-Suite through a model: completed outputs satisfy every schema that compiles."""

from __future__ import annotations

import json
import os
from typing import Any

import jsonschema
import pytest

from jaxllm import LLM, SamplingParams, UserError
from tests.structured_output.test_outputs import SUITE, UNJUDGED
from tests.support.sizes import MANY_SLOTS

OUTPUTS = int(os.environ.get("SUITE_OUTPUTS", "2"))  # outputs of each schema; 40 before a release


@pytest.mark.slow
@pytest.mark.skipif(not SUITE.exists(), reason="The JSON-Schema-Test-Suite is not beside the checkout.")
@pytest.mark.parametrize("own", [{}, {"disable_any_whitespace": True}], ids=str)
def test_outputs_of_a_model_satisfy_the_schemas_of_the_suite(own: dict[str, bool]) -> None:
    groups = [group for file in sorted(SUITE.glob("*.json")) for group in json.loads(file.read_text())]
    schemas = [group["schema"] for group in groups if group["description"] not in UNJUDGED]
    prompts, params, compiled = [], [], []
    invalid: list[tuple[object, str, str | int | None]] = []
    num_ended = num_other = 0
    with LLM(**MANY_SLOTS) as llm:
        for number, schema in enumerate(schemas):
            asked: Any = {"json": json.dumps(schema), **own}
            one = SamplingParams(temperature=1.0, seed=number, max_tokens=64, n=OUTPUTS, structured_outputs=asked)
            prompt = f"Write JSON of this schema: {asked['json'][:200]}\n"
            try:
                llm.engine.accept("1", prompt, one)
            except UserError:
                continue
            compiled.append(schema)
            prompts.append(prompt)
            params.append(one)
        for schema, output in zip(compiled, llm.generate(prompts, params, use_tqdm=False), strict=True):
            judge = jsonschema.Draft202012Validator(schema)
            for told in output.outputs:
                if told.finish_reason == "stop":
                    num_ended += 1
                    if not judge.is_valid(json.loads(told.text)):
                        invalid.append((schema, told.text, None))
                else:
                    num_other += 1
                    if told.finish_reason != "length":
                        invalid.append((schema, told.text, told.stop_reason))
        assert llm.engine.metrics.compilations_after_ready == 0
    print(f"{len(compiled)} of {len(schemas)} schemas compile; {num_ended} outputs ended, {num_other} were cut")
    assert not invalid, invalid
    assert len(compiled) > len(schemas) / 3 and num_ended > num_other
