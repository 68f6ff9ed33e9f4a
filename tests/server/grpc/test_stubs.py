"""The committed stubs match the proto files, and the API keeps its compatibility promises."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from jaxllm.v1 import control_pb2, inference_pb2, types_pb2
from tests.support.paths import ROOT

FILES = (types_pb2, inference_pb2, control_pb2)
MESSAGES = [message for file in FILES for message in file.DESCRIPTOR.message_types_by_name.values()]


def test_stubs_are_those_of_the_proto_files(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    subprocess.run([sys.executable, ROOT / "proto" / "generate.py", tmp_path], check=True, timeout=60)
    made = {path.name: path.read_bytes() for path in (tmp_path / "jaxllm" / "v1").iterdir()}
    committed = {path.name: path.read_bytes() for path in (ROOT / "jaxllm" / "v1").glob("*_pb2*")}
    assert len(made) == 9
    assert made == committed, "make proto"
    options = Path("jaxllm", "client", "sampling_options.py")
    assert (tmp_path / options).read_text() == (ROOT / options).read_text(), "make proto"


def test_buf_finds_nothing() -> None:
    installed = Path(sys.executable).parent / "buf"
    buf = installed if installed.exists() else shutil.which("buf")
    if buf is None:
        pytest.skip("buf is not installed")
    for command in (["lint"], ["format", "--diff", "--exit-code"]):
        ran = subprocess.run([buf, *command], cwd=ROOT / "proto", capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_lint_is_waived_where_two_calls_share_messages_and_nowhere_else() -> None:
    waived = [
        line.split()[-1]
        for path in sorted((ROOT / "proto").rglob("*.proto"))
        for line in path.read_text().splitlines()
        if "buf:lint:ignore" in line
    ]
    generate = ["RPC_REQUEST_RESPONSE_UNIQUE", "RPC_REQUEST_RESPONSE_UNIQUE", "RPC_REQUEST_STANDARD_NAME"]
    assert waived == [*generate, *generate, "RPC_RESPONSE_STANDARD_NAME"]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.name)
def test_field_numbers_take_one_byte(message: Descriptor) -> None:
    numbers = [field.number for field in message.fields]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))
    assert len(numbers) <= 15


@pytest.mark.parametrize("name", ["SamplingParams", "StopConditions", "OutputOptions"])
def test_every_scalar_of_a_request_knows_whether_it_was_given(name: str) -> None:
    """Set and unset scalars are distinct: an engine for which zeros meant defaults answered temperature=0 at random."""
    for field in types_pb2.DESCRIPTOR.message_types_by_name[name].fields:
        assert field.is_repeated or field.has_presence, field.name


def test_repeated_numbers_are_packed() -> None:
    scalars = [
        field
        for message in MESSAGES
        for field in message.fields
        if field.is_repeated and field.cpp_type not in (FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE)
    ]
    assert scalars
    assert all(field.is_packed for field in scalars)


def test_zero_of_every_enum_means_not_given() -> None:
    for file in FILES:
        for enum in file.DESCRIPTOR.enum_types_by_name.values():
            assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")


def test_a_delta_can_be_read_as_an_output() -> None:
    """All fields are the same except tool calls, which are streamed in pieces."""
    output, delta = types_pb2.Output.DESCRIPTOR, types_pb2.OutputDelta.DESCRIPTOR
    assert [field.name for field in output.fields] == [field.name for field in delta.fields]
    for one, other in zip(output.fields, delta.fields, strict=True):
        assert (one.number, one.type) == (other.number, other.type)
        assert one.name == "tool_calls" or one.message_type is other.message_type
