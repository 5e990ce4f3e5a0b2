"""The Python code that `make generate` writes from the EPP's .proto files."""

from importlib.resources import files
from pathlib import Path

import pytest
from grpc_tools import protoc

from tandem_epp.server.ext_proc import ext_proc_pb2 as pb

FOLDER = Path(pb.__file__).parent


@pytest.mark.parametrize("suffix", ["py", "pyi"])
@pytest.mark.parametrize("name", ["ext_proc/ext_proc", "ext_proc/access_log", "http2/health"])
def test_the_generated_code_is_current(name: str, suffix: str, tmp_path: Path) -> None:
    sources = f"-I{FOLDER.parents[2]}", f"-I{files('grpc_tools') / '_proto'}"
    outputs = f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"
    assert protoc.main(["protoc", *sources, *outputs, f"tandem_epp/server/{name}.proto"]) == 0
    file = f"{name}_pb2.{suffix}"
    generated = (tmp_path / "tandem_epp" / "server" / file).read_text(encoding="utf-8")
    current = (FOLDER.parent / file).read_text(encoding="utf-8")
    assert generated == current, "stale: run make generate"


def test_undeclared_fields_are_ignored() -> None:
    """Envoy also sends `attributes` (9) and `observability_mode` (10)."""
    message = pb.ProcessingRequest(request_body=pb.HttpBody(body=b"hi", end_of_stream=True))
    unknown = bytes((9 << 3 | 2, 2, 0x0A, 0, 10 << 3, 1))
    assert pb.ProcessingRequest.FromString(unknown + message.SerializeToString()).request_body == (
        message.request_body
    )
