"""Makes the Python stubs of the API again: `make proto`, or `python proto/generate.py [folder]`.

The folder (default: the repository) gets `jaxllm/v1/`. Needs grpcio-tools 1.81.1: generated code runs on the
protobuf that it was made for and on the next major version, never on an older one, and 1.81 makes it for 6.33.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

SOURCES = Path(__file__).parent
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


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCES.parent)
