"""h2spec, which tests servers by the sections of the HTTP/2 and HPACK specifications."""

import asyncio
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tandem_epp.server.http2.limits import Limits

from .test_server import serving

pytestmark = pytest.mark.component

TOLERATED = {
    # The server announces a table of size 0, but goes on decoding for a client that uses the one of
    # 4,096 bytes which it may use at first; h2spec's own client does in all other tests.
    "Sends a dynamic table size update larger than the value of SETTINGS_HEADER_TABLE_SIZE"
}


@pytest.mark.parametrize("group", ["generic", "http2", "hpack"])
async def test_conformance(h2spec_program: Path, group: str, tmp_path: Path) -> None:
    # The test of concurrency opens at most 100 streams.
    async with serving(Limits(streams=50)) as served:
        report = tmp_path / "report.xml"
        # The length makes its large header section larger than the frames that we announce.
        process = await asyncio.create_subprocess_exec(
            h2spec_program, group, "--port", str(served.port), "--path", "/readyz",
            "--max-header-length", "14000", "--timeout", "5", "--junit-report", report,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output, _ = await process.communicate()
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert len(cases) > 5, output.decode()
    failed = {
        case.get("classname", "")
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    }
    skipped = {case.get("classname", "") for case in cases if case.find("skipped") is not None}
    assert failed <= (TOLERATED if group == "hpack" else set()), output.decode()
    assert skipped == set()
