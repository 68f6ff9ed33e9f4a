"""`jaxllm generate`: continue prompts from arguments, a file or standard input."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxllm.commands.arguments import Subparsers, UsageError, add_model, add_profile, engine_config, new_command
from jaxllm.commands.flags import add_engine_flags, flag_of
from jaxllm.commands.session import add_request_flags, add_verbose, open_llm, params_of, profile, stream, with_lora
from jaxllm.errors import UserError
from jaxllm.outputs import Logprob, RequestOutput
from jaxllm.sampling_params import SamplingParams

GENERATE_TOKENS = 128

_IN_JSON = ("logprobs", "prompt_logprobs", "logprob_token_ids")


def add(commands: Subparsers) -> None:
    parser = new_command(commands, "generate", run, "generate text from prompts")
    parser.description = (
        "Generate text from prompts. Without PROMPT and --file, or for the PROMPT '-', standard input is the prompt."
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt; '-': standard input")
    parser.add_argument(
        "--file",
        help="file with one prompt per line; or, if the first line begins with '{', JSON lines with a \"prompt\" and "
        "sampling parameters that override the flags; '-': standard input",
    )
    parser.add_argument("--json", action="store_true", help="write one line of JSON for each output")
    add_profile(parser)
    add_model(parser)
    add_verbose(parser)
    add_request_flags(parser, GENERATE_TOKENS)
    add_engine_flags(parser.add_argument_group("engine"))


def run(options: dict[str, Any]) -> int:
    """Generate and print outputs; return 1 if one failed, 130 after ^C."""
    options, further = with_lora(options)
    engine_config(options)
    from_flags = params_of(options, GENERATE_TOKENS)
    if not options["json"]:
        _warn_of_numbers(from_flags)
    jobs = _read_prompts(options, from_flags)
    with open_llm(options, precompile="background") as llm:
        default = llm.get_default_sampling_params()
        params = [replace(default, **{**from_flags, **override}) for _, override in jobs]
        started = time.monotonic()
        with profile(llm, options):
            if len(jobs) == 1 and params[0].n == 1 and not options["json"] and sys.stdout.isatty():
                output, was_interrupted = stream(llm, jobs[0][0], params[0], further)
                print()
                if was_interrupted or output is None:
                    return 130
                outputs = [output]
            else:
                prompts = [prompt for prompt, _ in jobs]
                outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty(), **further)
                _write(outputs, options["json"])
        _write_speed(outputs, time.monotonic() - started)
    return 1 if any(completion.finish_reason == "error" for output in outputs for completion in output.outputs) else 0


def _warn_of_numbers(from_flags: Mapping[str, Any]) -> None:
    names = [flag_of(name, SamplingParams) for name in _IN_JSON if from_flags.get(name) is not None]
    if names:
        print(f"jaxllm: warning: {', '.join(names)}: log-probabilities are written with --json only", file=sys.stderr)


def _read_prompts(options: Mapping[str, Any], from_flags: Mapping[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    prompts, file = options["prompts"], options["file"]
    if file is not None and prompts:
        raise UsageError("give prompts as arguments or with --file, not both")
    if file is not None:
        jobs = _prompts_of_file(file, from_flags)
        if not jobs:
            raise UserError(f"{file} holds no prompt.")
        return jobs
    if not prompts:
        prompts = [] if sys.stdin.isatty() else [_read("-").removesuffix("\n")]
        if not any(prompts):
            raise UsageError("no prompt: give one as an argument, with --file, or on standard input")
    return [(_read("-").removesuffix("\n") if prompt == "-" else prompt, {}) for prompt in prompts]


def _prompts_of_file(file: str, from_flags: Mapping[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    lines = [(number, line) for number, line in enumerate(_read(file).split("\n"), 1) if line.strip()]
    if not lines or not (file.endswith(".jsonl") or lines[0][1].lstrip().startswith("{")):
        return [(line, {}) for _, line in lines]
    jobs = []
    for number, line in lines:
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or "prompt" not in record:
                raise UserError('expected an object with a "prompt"')
            prompt = record.pop("prompt")
            SamplingParams(**{**from_flags, **record})
        except ValueError as error:  # UserError is a ValueError
            raise UserError(f"{file}, line {number}: {error}") from error
        except RecursionError as error:
            raise UserError(f"{file}, line {number}: its lists and objects are nested too deeply") from error
        jobs.append((prompt, record))
    return jobs


def _read(file: str) -> str:
    try:
        if file == "-":
            return sys.stdin.read()
        with open(file, encoding="utf-8") as stream:
            return stream.read()
    except UnicodeDecodeError as error:
        raise UserError(f"{'standard input' if file == '-' else file} is not UTF-8 text: {error.reason}.") from error


def _write(outputs: Sequence[RequestOutput], as_json: bool) -> None:
    several = len(outputs) > 1 or len(outputs[0].outputs) > 1
    for output in outputs:
        for completion in output.outputs:
            if as_json:
                print(json.dumps(_record(output, completion.index), ensure_ascii=False))
                continue
            if several:
                shown = output.prompt if output.prompt is not None else str(list(output.prompt_token_ids))
                first_line = (shown.strip().split("\n") or [""])[0]
                print(f"==> {first_line if len(first_line) <= 60 else first_line[:59] + '…'} <==")
            print(completion.text + ("\n" if several else ""))


def _record(output: RequestOutput, index: int) -> dict[str, Any]:
    completion = output.outputs[index]
    record = {
        "prompt": list(output.prompt_token_ids) if output.prompt is None else output.prompt,
        "index": index,
        "text": completion.text,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        record["logprobs"] = [_candidates(position) for position in completion.logprobs]
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [position and _candidates(position) for position in output.prompt_logprobs]
    return record


def _candidates(position: Mapping[int, Logprob]) -> list[dict[str, Any]]:
    return [
        {"token_id": token, "token": entry.decoded_token, "logprob": entry.logprob, "rank": entry.rank}
        for token, entry in position.items()
    ]


def _write_speed(outputs: Sequence[RequestOutput], seconds: float) -> None:
    num_in = sum(len(output.prompt_token_ids) for output in outputs)
    num_out = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    speed = num_out / max(seconds, 1e-9)
    print(f"{num_in} prompt tokens, {num_out} tokens in {seconds:.2f} s: {speed:.1f} tokens/s", file=sys.stderr)
