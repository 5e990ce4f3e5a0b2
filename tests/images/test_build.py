"""Each image starts what its name says, from an archive and from the Dockerfile."""

import re
from pathlib import Path

import pytest
from images import build
from images.oci import Text, write_archive, write_layer

from .archives import config

DOCKERFILE = Path(__file__).parents[2] / "images/tandem.Dockerfile"


@pytest.mark.parametrize(
    ("command", "expected"), [("tandem-epp", ["/usr/local/bin/tandem-epp"]), (None, [])]
)
def test_a_container_runs_the_command_of_its_image(
    tmp_path: Path, command: str | None, expected: list[str]
) -> None:
    layer = write_layer({"/opt/a": Text(b"a")}, tmp_path / "layer.tar")
    write_archive(build.image("thing", "1", [layer], command), tmp_path / "thing.tar")
    assert config(tmp_path / "thing.tar")["Entrypoint"] == expected


def test_the_dockerfile_has_the_same_images() -> None:
    stages = DOCKERFILE.read_text().split("\nFROM installed AS ")[1:]
    found = {
        stage.partition("\n")[0]: re.findall(r'^ENTRYPOINT \["(.*)"\]$', stage, re.MULTILINE)
        for stage in stages
    }
    assert found == {name: [name] for name in build.ENTRYPOINTS} | {"tandem": []}
    assert list(found)[-1] == "tandem", "docker build without --target builds the last stage"
