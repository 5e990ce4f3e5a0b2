"""The Python code that `make generate` writes from ext_proc.proto."""

from importlib.resources import files
from pathlib import Path

import pytest
from grpc_tools import protoc

from tandem_epp.ext_proc import ext_proc_pb2 as pb

FOLDER = Path(pb.__file__).parent


@pytest.mark.parametrize("name", ["ext_proc_pb2.py", "ext_proc_pb2.pyi"])
def test_the_generated_code_is_current(name: str, tmp_path: Path) -> None:
    sources = f"-I{FOLDER.parents[1]}", f"-I{files('grpc_tools') / '_proto'}"
    outputs = f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"
    assert protoc.main(["protoc", *sources, *outputs, "tandem_epp/ext_proc/ext_proc.proto"]) == 0
    generated = (tmp_path / "tandem_epp" / "ext_proc" / name).read_text(encoding="utf-8")
    assert generated == (FOLDER / name).read_text(encoding="utf-8"), "stale: run make generate"


def test_undeclared_fields_are_ignored() -> None:
    """Envoy also sends `attributes` (9) and `observability_mode` (10)."""
    message = pb.ProcessingRequest(request_body=pb.HttpBody(body=b"hi", end_of_stream=True))
    unknown = bytes((9 << 3 | 2, 2, 0x0A, 0, 10 << 3, 1))
    assert pb.ProcessingRequest.FromString(unknown + message.SerializeToString()).request_body == (
        message.request_body
    )
