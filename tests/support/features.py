"""`make features`: the product files that depend on a row feature, by git and imports.

A feature's files are its module or folder in jaxllm/engine/features, and files of other rooms with its stem in their
names. Another file depends on the feature if it imports one of them, also for types or inside of functions. `--against
COMMIT` counts the files of a commit.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections.abc import Mapping

from tests.support.paths import ROOT

# In file names, by the feature's name in `engine.features.table.FEATURES`.
STEMS = {
    "adapters": "adapter|lora",
    "beams": "beam",
    "drafts": "draft|eagle|speculative",
    "grammars": "grammar|structured|constrain",
    "pooling": "pool(?!_stream)|encoder_",
    "scoring": "scoring",
}
NOT_OWN = "block_pool"  # of the scheduler
GENERATED = ("jaxllm/client/sampling_options.py",)
ROOMS = ("jaxllm", "server", "pallas_kernels")


def sources(commit: str | None) -> dict[str, str]:
    """Return the text of each product file by its path."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    listed = git("ls-files", *ROOMS) if commit is None else git("ls-tree", "-r", "--name-only", commit, *ROOMS)
    paths = [path for path in listed.split() if path.endswith(".py") and "_pb2" not in path and path not in GENERATED]
    if commit is None:
        return {path: (ROOT / path).read_text() for path in paths if (ROOT / path).exists()}
    return {path: git("show", f"{commit}:{path}") for path in paths}


def imports_of(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the paths that each file imports."""
    path_of = {path.removeprefix("server/").removesuffix(".py").replace("/", "."): path for path in texts}
    path_of |= {name.removesuffix(".__init__"): path for name, path in path_of.items() if name.endswith(".__init__")}

    def names(node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import):
            return [each.name for each in node.names]
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = [f"{node.module}.{each.name}" for each in node.names]
            known = [name for name in inner if name in path_of]
            return known if len(known) == len(inner) else [*known, node.module]
        return []

    return {
        path: {path_of[name] for node in ast.walk(ast.parse(text)) for name in names(node) if name in path_of}
        for path, text in texts.items()
    }


def knowing(commit: str | None = None) -> dict[str, tuple[list[str], list[str]]]:
    """Return the files of each feature, and the files that depend on it."""
    imports = imports_of(sources(commit))
    found = {}
    for feature, stem in STEMS.items():
        own = {path for path in imports if re.search(stem, path.partition("/")[2]) and NOT_OWN not in path}
        found[feature] = sorted(own), sorted(path for path, used in imports.items() if path not in own and used & own)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", metavar="COMMIT")
    for feature, (own, others) in knowing(parser.parse_args().against).items():
        print(f"{feature}: {len(own)} files of its own, {len(others)} others know it")
        for path in others:
            print(f"    {path}")


if __name__ == "__main__":
    main()
