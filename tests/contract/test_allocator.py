"""Large blocks are reused: memory that was freed is not cleared by the kernel again."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from tandem_contract.memory import reuse_large_blocks
if sys.argv[1] == "reuse":
    assert reuse_large_blocks()
for _ in range(100):
    bytearray(300_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    # Two at a time, as with a body and its copy.
    first, second = bytes(bytearray(300_000)), bytes(bytearray(900_000))
    del first, second
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    command = [sys.executable, "-c", FAULTS, mode]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_large_blocks_cause_no_page_faults() -> None:
    assert page_faults("reuse") < page_faults("default") / 4
