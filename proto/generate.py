"""Generate the Python code of the API's declarations: `make proto`, or `python proto/generate.py [folder]`.

The folder (default: the repository) gets the Python stubs, `jaxllm/v1/`, and `jaxllm/client/sampling_options.py`. Needs
grpcio-tools 1.81.1: generated code runs on the protobuf that it was made for and on the next major version, never on an
older one, and 1.81 makes it for 6.33.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

from jaxllm.sampling_fields import GRPC, declaration_of, names_in
from jaxllm.sampling_params import SamplingParams

SOURCES = Path(__file__).parent
HEAD = '''"""The client's options that are fields of `SamplingParams`. Made by proto/generate.py of declarations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from jaxllm.sampling_params import RepetitionDetectionParams
from jaxllm.structured_outputs_params import StructuredOutputsParams


class SamplingOptions(TypedDict, total=False):
    """Fields of `SamplingParams`, which has their meaning; None, like absence, leaves one to the model's defaults."""

'''
VERSION = "1.81.1"  # exact, because the stubs name it


def generate(folder: Path) -> None:
    """Write the stubs into `folder`/jaxllm/v1, which is made if it does not exist.

    Raises:
        SystemExit: with one line, for another grpcio-tools or a proto file that does not compile.
    """
    found = version("grpcio-tools")
    if found != VERSION:
        raise SystemExit(f"grpcio-tools is {found}, but the stubs are made with {VERSION}.")
    (folder / "jaxllm" / "v1").mkdir(parents=True, exist_ok=True)
    protos = sorted(str(path.relative_to(SOURCES)) for path in (SOURCES / "jaxllm" / "v1").glob("*.proto"))
    outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
    status = protoc.main(
        ["protoc", f"--proto_path={SOURCES}", f"--proto_path={files('grpc_tools') / '_proto'}", *outputs, *protos]
    )
    if status != 0:
        raise SystemExit("protoc failed; what it said is above.")
    (folder / "jaxllm" / "client").mkdir(parents=True, exist_ok=True)
    (folder / "jaxllm" / "client" / "sampling_options.py").write_text(sampling_options())


def sampling_options() -> str:
    """Return the module with the client's options that are fields of `SamplingParams`.

    Type checkers do not know a class that is made at run time.
    """
    lines = []
    for path, name in names_in(SamplingParams, GRPC).items():
        if not path.startswith("stream."):
            own = SamplingParams.__dataclass_fields__[name]
            kind = declaration_of(own).given or str(own.type).removesuffix(" | None")
            lines.append(f"    {name}: {kind} | None")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCES.parent)
