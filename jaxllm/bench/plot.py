"""Plot a benchmark's result as an image."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.bench.samples import Groups, read_samples
from jaxllm.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLES = {
    "ttft_ms": "Time to first token (ms)",
    "tpot_ms": "Time per output token (ms)",
    "itl_ms": "Inter-token latency (ms)",
    "latency": "Latency (s)",
    "e2el_ms": "End-to-end latency (ms)",
}
MOST_POINTS = 1000  # per curve: a million would make 100 MB
PANEL = (7.0, 2.6)  # inches
WIDE = 10.0  # max / min of a logarithmic axis


def check(path: str) -> None:
    if Path(path).suffix not in (".png", ".html"):
        raise UserError(f"{path}: a picture is a .png or a .html file.", "plot")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError("pictures need matplotlib: pip install 'jaxllm[bench]'", "plot") from error


def plot(result: Mapping[str, Any], path: str) -> None:
    """Plot a result's samples and timeline, if any, to a .png or .html file.

    `result["timeline"]` has lists of equal length: seconds, running and waiting requests, kv_usage (share), and
    cumulative generated_tokens and compilations. Raises `UserError` for another suffix, or without matplotlib or data.
    """
    check(path)
    from matplotlib.figure import Figure

    kinds, timeline = read_samples(result), result.get("timeline")
    if len(kinds) > 1:
        kinds.pop("e2el_ms", None)
    known = {name: groups for name, groups in kinds.items() if name in TITLES}
    others = {name: groups for name, groups in kinds.items() if name not in TITLES}
    num_panels = len(known) + bool(others) + (3 if timeline else 0)
    if not num_panels:
        raise UserError("the result has neither samples nor a timeline to draw.", "plot")
    figure = Figure(figsize=(PANEL[0], PANEL[1] * num_panels), layout="constrained")
    panels = iter(figure.subplots(num_panels, 1, squeeze=False)[:, 0])
    for name, groups in known.items():
        _distribution(next(panels), {name: groups}, TITLES[name])
    if others:
        _distribution(next(panels), others, "Samples")
    if timeline:
        _timeline([next(panels) for _ in range(3)], {name: np.asarray(values) for name, values in timeline.items()})
    figure.suptitle(title(result), fontsize="small")
    target = Path(path).expanduser()
    if target.suffix == ".png":
        figure.savefig(target, format="png", dpi=150)
        return
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    svg = drawn.getvalue()
    name = html.escape(title(result))
    page = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{name}</title>\n'
    target.write_text(page + svg[svg.index("<svg") :] + "</html>\n", encoding="utf-8")


def title(result: Mapping[str, Any]) -> str:
    environment = result.get("environment", {})
    command = " ".join(str(word) for word in environment.get("command", [])[1:])
    known = [result.get("model_id"), command, environment.get("commit"), environment.get("date") or result.get("date")]
    line = "jaxllm · " + " · ".join(str(part) for part in known if part)
    return line if len(line) <= 120 else line[:119] + "…"


def _distribution(axes: Axes, kinds: Mapping[str, Groups], label: str) -> None:
    shares = np.linspace(0, 1, MOST_POINTS)
    for name, groups in kinds.items():
        values = np.array([value for group in groups for value in group])
        middle, late = np.percentile(values, [50, 99])
        legend = f"{'' if len(kinds) == 1 else name + ': '}median {middle:.4g}, p99 {late:.4g}, n = {len(values)}"
        axes.plot(np.quantile(values, shares), shares, label=legend)
    drawn = np.concatenate([line.get_xdata() for line in axes.get_lines()])  # pyright: ignore[reportArgumentType]
    if drawn.min() > 0 and drawn.max() > WIDE * drawn.min():
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(label)
    axes.set_ylabel("share of values")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="x-small", loc="lower right")


def _timeline(panels: Sequence[Axes], timeline: Mapping[str, np.ndarray]) -> None:
    seconds = timeline["seconds"]
    requests, speed, usage = panels
    requests.step(seconds, timeline["running"], where="post", label="running")
    requests.step(seconds, timeline["waiting"], where="post", label="waiting")
    requests.set_ylabel("requests")
    if len(seconds) > 1:
        gaps = np.maximum(np.diff(seconds), 1e-9)
        speed.stairs(np.diff(timeline["generated_tokens"]) / gaps, seconds, label="generated")
    speed.set_ylabel("tokens a second")
    usage.step(seconds, 100 * timeline["kv_usage"], where="post", label="KV blocks in use")
    usage.set_ylabel("%")
    usage.set_ylim(0, 100)
    usage.set_xlabel("seconds")
    compiled = seconds[1:][np.diff(timeline["compilations"]) > 0]
    for axes in panels:
        for number, moment in enumerate(compiled):
            axes.axvline(moment, color="tab:red", linewidth=0.8, label="a program compiled" if number == 0 else None)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="x-small", loc="upper right")
