"""The package is cheap to import, does not import torch, and matches its documentation."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tomllib

import pytest

import jaxllm
from jaxllm import client
from jaxllm.families.families import FAMILIES
from tests.support.paths import ROOT

IMPORT = """
import sys, time
start = time.process_time()
import jaxllm
spent = time.process_time() - start
from jaxllm import EngineConfig, SamplingParams
heavy = [name for name in ("jax", "numpy", "flax", "transformers", "tokenizers", "torch") if name in sys.modules]
print(spent, *heavy)
"""


def test_importing_costs_milliseconds_and_nothing_heavy() -> None:
    runs = [
        subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(3)
    ]
    assert all(len(run) == 1 for run in runs), f"imported {runs[0][1:]}"
    assert min(float(run[0]) for run in runs) < 0.05


@pytest.mark.ci
def test_the_engine_does_not_import_torch() -> None:
    modules = "jaxllm.llm, jaxllm.commands.cli, jaxllm.commands.doctor_report"
    code = f"import sys, {modules}; print(*{{'torch', 'transformers'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_every_public_name_loads() -> None:
    assert all(getattr(jaxllm, name) is not None for name in jaxllm.__all__)
    assert set(jaxllm.__all__) <= set(dir(jaxllm))


def test_the_public_api_has_docstrings() -> None:
    public = [getattr(jaxllm, name) for name in jaxllm.__all__] + [client.Client, client.AsyncClient]
    objects = [each for each in public if inspect.isclass(each) and each.__module__.startswith("jaxllm")]
    methods = [
        method
        for each in objects
        for name, method in vars(each).items()
        if not name.startswith("_") and inspect.isfunction(method)
    ]
    assert len(methods) > 50
    assert [each for each in [*objects, *methods] if not each.__doc__] == []


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == jaxllm.__version__


def test_the_list_of_families_is_complete() -> None:
    rows = re.findall(r"^\|[^|]+\|((?: `\w+`,?)+) \|", (ROOT / "docs/models.md").read_text(), re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"\w+", row)}
    assert listed == {architecture for family in FAMILIES for architecture in family.architectures}


def test_no_module_holds_state() -> None:
    """Module-level lists, dicts and sets are constants: upper-case names, or dunder ones."""
    for path in [*(ROOT / "jaxllm").rglob("*.py"), *(ROOT / "pallas_kernels").rglob("*.py")]:
        text = path.read_text()
        assert not re.search(r"^\s*global ", text, re.MULTILINE), path
        for name in re.findall(r"^([A-Za-z_]\w*)(?:: [^=\n]+)? = (?:\[|\{|dict\(|list\(|set\()", text, re.MULTILINE):
            assert name.upper() == name or name == "__all__", f"{path}: {name}"
