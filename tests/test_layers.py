"""Each module imports only what its row in ARCHITECTURE.md names, and the table names every module."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PURE = {"scheduler", "state", "blocks", "batch"}
WHOLE = ("embedded", "client", "v1")  # packages that are one row
MAPPINGS = {
    *("calls", "chat_checks", "grpc_messages", "grpc_replies"),
    *("openai_messages", "openai_completions", "openai_chat", "openai_tokens"),
}
IMPURE = {"jax", "time", "random", "threading", "asyncio", "logging"}


def read_table() -> dict[str, set[str]]:
    """Read the rows `| module | may import |`; a `*` marks what may be imported inside functions only."""
    lines = (ROOT / "ARCHITECTURE.md").read_text().splitlines()
    start = lines.index("| module | may import |") + 2
    table = {}
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        name, allowed = (cell.strip() for cell in line.strip("|").split("|"))
        table[name] = {item.strip() for item in allowed.split(",") if item.strip()}
    return table


def module_name(path: Path) -> str:
    """jaxllm/model/spec.py is model/spec; packages that the table treats as one are named by their folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "pallas_kernels":
        return "pallas_kernels"
    if parts[0] == "server":
        return "/".join(["server", *parts[2:]])
    return parts[1] if parts[1] in WHOLE else "/".join(parts[1:]).removesuffix("/__init__")


def imports(tree: ast.Module) -> list[tuple[int, str, bool]]:
    """List (line, imported name, inside a function) of everything a module imports while it runs."""
    found = []

    def visit(node: ast.AST, is_inside: bool) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            found.extend((node.lineno, alias.name, is_inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if base in ("jaxllm", "jaxllm.model", "jaxllm.commands", "jaxllm.bench", "jaxllm_server"):
                found.extend((node.lineno, f"{base}.{alias.name}", is_inside) for alias in node.names)
            else:
                found.append((node.lineno, base, is_inside))
        for child in ast.iter_child_nodes(node):
            visit(child, is_inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    visit(tree, False)
    return found


def target(name: str) -> str:
    """Name what is imported as the table does: our modules by their path, others by their top-level package."""
    parts = name.split(".")
    if parts[0] == "jaxllm_server":
        return "/".join(["server", *parts[1:]])
    if parts[0] != "jaxllm":
        return parts[0]
    return parts[1] if parts[1:] and parts[1] in WHOLE else "/".join(parts[1:])


MODULES = sorted(
    path
    for package in ("jaxllm", "pallas_kernels", "server")
    for path in (ROOT / package).rglob("*.py")
    if module_name(path) not in ("", "__init__", "model", "commands", "bench", "__main__", "server/__init__", "v1")
)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_its_row_allows(path: Path) -> None:
    name = module_name(path)
    table = read_table()
    assert name in table, f"{name} has no row in ARCHITECTURE.md"
    if name == "embedded" and path.name != "__init__.py":
        return  # the training script is a program of its own; what the engine imports is __init__.py
    for line, imported, is_inside in imports(ast.parse(path.read_text())):
        wanted = target(imported)
        if wanted in (name, "__version__", "") or imported.split(".")[0] in sys.stdlib_module_names:
            continue
        allowed = wanted in table[name] or (is_inside and f"{wanted}*" in table[name])
        assert allowed, f"{path.relative_to(ROOT)}:{line} imports {imported}"


@pytest.mark.parametrize(
    "path",
    [
        *(f"jaxllm/{name}.py" for name in sorted(PURE)),
        *(f"server/jaxllm_server/{name}.py" for name in sorted(MAPPINGS)),
    ],
)
def test_what_is_pure_touches_no_clock_no_chance_no_device(path: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    assert not {target(imported) for _, imported, _ in imports(tree)} & IMPURE


def test_every_row_is_a_module() -> None:
    assert set(read_table()) == {module_name(path) for path in MODULES}


def test_no_family_is_named_where_the_decoder_is_written() -> None:
    from jaxllm.model.families import FAMILIES

    architectures = [architecture for family in FAMILIES for architecture in family.architectures]
    names = {architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel") for architecture in architectures}
    for module in ("decoder", "layers"):
        code = ast.unparse(ast.parse((ROOT / "jaxllm" / "model" / f"{module}.py").read_text()))
        words = set("".join(c if c.isalnum() else " " for c in code).lower().split())
        assert not {name.lower() for name in names} & words
