"""The results of all parts, as one JSON file and one Markdown file of the same name."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

Parts = dict[str, dict[str, Any]]


def write(parts: Parts, folder: Path, is_dry: bool) -> Path:
    """Write both files, merged with other parts of this device and day; return the Markdown's path."""
    folder.mkdir(parents=True, exist_ok=True)
    machine = parts["machine"]["measured"][0]
    date = time.strftime("%Y-%m-%d")
    device = re.sub(r"[^a-z0-9]+", "-", machine["device"].lower()).strip("-")
    path = folder / f"{device}-{date}.json"
    if path.exists():
        parts = json.loads(path.read_text())["parts"] | parts
    result = {"device": machine["device"], "date": date, "is_dry": is_dry, "machine": machine, "parts": parts}
    path.write_text(json.dumps(result, indent=1) + "\n")
    target = path.with_suffix(".md")
    target.write_text(markdown(parts, machine["device"], date))
    return target


def verdict(part: dict[str, Any]) -> str:
    """Return a part's verdict: failed, incomplete or passed."""
    if part["failures"]:
        return "failed"
    return "incomplete" if part["not_run"] or part["status"] != "done" else "passed"


def summary(parts: Parts) -> str:
    """Summarize failures, omissions and targets in a few lines."""
    lines = []
    for name, part in parts.items():
        lines.append(
            f"{name:12} {verdict(part)} ({part['status']}, {part['seconds']:.0f} s): {len(part['measured'])} measured, "
            f"{len(part['failures'])} failed, {len(part['not_run'])} not run, {len(part['skipped'])} skipped"
        )
    for name, part in parts.items():
        lines += [f"{one['state']:8} {_target(one)}" for one in part["targets"]]
        lines += [f"FAILED   {name}: {line}" for line in part["failures"]]
        lines += [f"NOT RUN  {name}: {line}" for line in part["not_run"]]
    return "\n".join(lines)


def markdown(parts: Parts, device: str, date: str) -> str:
    """Write all results as tables."""
    lines = [f"# {device}, {date}", "", "Made by `make gpu-check`.", ""]
    targets = [(name, one) for name, part in parts.items() for one in part["targets"]]
    if targets:
        lines += ["| part | target | |", "| --- | --- | --- |"]
        lines += [f"| {name} | {_target(one)} | {one['state']} |" for name, one in targets]
        lines.append("")
    for name, part in parts.items():
        lines += [f"## {name}: {verdict(part)}", "", f"{part['status'].capitalize()}, {part['seconds']:.0f} s.", ""]
        for title, kind in (("Failures", "failures"), ("Not run", "not_run"), ("Skipped", "skipped")):
            if part[kind]:
                lines += [f"{title}:", *(f"- {line}" for line in part[kind]), ""]
        lines += [f"- {one['question']} {one['answer']}" for one in part["answers"]] + [""] * bool(part["answers"])
        tables: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in part["measured"]:
            tables.setdefault(tuple(row), []).append(row)
        for columns, rows in tables.items():
            lines += ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
            lines += ["| " + " | ".join(_cell(row[column]) for column in columns) + " |" for row in rows]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _target(one: dict[str, Any]) -> str:
    return f"{one['what']}: {one['found']:.3g}, aim {'at least' if one['is_least'] else 'at most'} {one['aim']:g}"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")
