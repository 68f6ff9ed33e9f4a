"""`jaxllm doctor`: print the report of `doctor_report`."""

from __future__ import annotations

import json
from typing import Any

from jaxllm.commands.arguments import Subparsers, add_model, by_flags, engine_config, new_command
from jaxllm.commands.flags import add_engine_flags
from jaxllm.config import EngineConfig


def add(commands: Subparsers) -> None:
    parser = new_command(commands, "doctor", run, "show versions, devices and the settings chosen for a model")
    parser.description = (
        "Show versions, devices, memory and caches, and the settings chosen for a model, with reasons. "
        "The exit code is 0 if the model can run."
    )
    parser.add_argument("--json", action="store_true", help="write the report as one JSON object")
    add_model(parser)
    add_engine_flags(parser.add_argument_group("engine"), has_sampling=False)


def run(options: dict[str, Any]) -> int:
    config = engine_config(options)
    from jaxllm.commands import doctor_report

    report = doctor_report.examine(config)
    report["problems"] = [by_flags(problem, EngineConfig) for problem in report["problems"]]
    print(json.dumps(report, indent=2) if options["json"] else doctor_report.describe(report))
    return 0 if report["usable"] else 1
