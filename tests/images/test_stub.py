"""A stub library loads and defines no function."""

import ctypes
import sys
import sysconfig
from pathlib import Path

import pytest
from images.closure import elf_files, libraries
from images.stub import empty_library


def test_a_stub_loads_and_has_no_functions(tmp_path: Path) -> None:
    extension = next(elf_files(Path(sysconfig.get_path("stdlib")) / "lib-dynload"))
    stub = tmp_path / "libempty.so.1"
    stub.write_bytes(empty_library("libempty.so.1", like=extension))
    loaded = ctypes.CDLL(str(stub))
    with pytest.raises(AttributeError):
        _ = loaded.anything


def test_the_closure_of_this_interpreter_has_its_c_library() -> None:
    paths = libraries([Path(sys.executable).resolve()])
    assert any(Path(name).name.startswith("libc.so") for name in paths)
    assert all(path.is_file() for path in paths.values())
