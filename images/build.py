"""Build the images layer by layer; a layer is rebuilt only when its inputs change."""

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from tandem_contract.vllm_storage import PACKAGES_PATH

from . import contents, hot_path
from .oci import Files, Image, Layer, write_archive, write_layer

Say = Callable[[str], None]
_SOURCES = Path(__file__).parent
ENTRYPOINTS = ("tandem-epp", "tandem-router", "tandem-sidecar")
"""Commands with an image of their own, whose entrypoint they are: llm-d's charts pass arguments and
no command. These images have the layers of `tandem`."""
STORAGE = "tandem-vllm-storage"
"""Image of the init container that brings the storage connector into vLLM's pods."""
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/tmp",  # noqa: S108 - the only directory that pods make writable
    # torch looks up the user name, which has no /etc/passwd entry for an arbitrary UID.
    "USER": "tandem",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "SSL_CERT_FILE": f"{contents.SITE}/certifi/cacert.pem",
}


@dataclass(frozen=True)
class Checkout:
    """The source tree; layers are cached below it."""

    root: Path
    whole_engine: bool = False
    optimize: int = hot_path.OPTIMIZE
    """As for `hot_path.compile_modules`."""

    @property
    def layers(self) -> Path:
        return self.root / "build/images"

    @property
    def uv(self) -> Path:
        return self.root / ".venv-boot/bin/uv"

    def lock(self, name: str) -> Path:
        return self.root / f"requirements/{name}.lock"


def build(checkout: Checkout, out: Path, say: Say) -> list[Path]:
    """Write the archives into `out`. Raises contents.BuildFailed."""
    python = _python(checkout, say)
    dependencies, listed = _dependencies(checkout, say)
    project = _project(checkout, say)
    engine = _engine(checkout, listed, say)
    small, tag = [python, dependencies, project], version("tandem-llm")
    images = [
        image("tandem", tag, small),
        *(image(name, tag, small, command=name) for name in ENTRYPOINTS),
        image("tandem-engine", tag, [python, dependencies, engine, project]),
        storage_image(tag, _storage(checkout)),
    ]
    return [_write(built, out, say) for built in images]


def image(name: str, tag: str, layers: Sequence[Layer], command: str | None = None) -> Image:
    """The image `name`. `command`: one of the project's commands that its containers run with their
    arguments; None: containers name the command."""
    labels = {
        "org.opencontainers.image.title": name,
        "org.opencontainers.image.version": tag,
        "org.opencontainers.image.licenses": "Apache-2.0",
    }
    return Image(
        f"docker.io/library/{name}:{tag}",
        layers,
        entrypoint=[f"{contents.COMMANDS}/{command}"] if command else (),
        environment=_ENVIRONMENT,
        labels=labels,
    )


def storage_image(tag: str, layer: Layer) -> Image:
    """The image STORAGE: its argument is the folder that the packages are copied to."""
    return replace(
        image(STORAGE, tag, [layer]),
        entrypoint=("/usr/bin/cp", "-R", f"{contents.PACKAGES}/."),
        arguments=(PACKAGES_PATH,),
        environment={},
    )


def _write(built: Image, out: Path, say: Say) -> Path:
    reference = built.reference.rpartition("/")[2]
    archive = out / f"{reference.partition(':')[0]}.tar"
    write_archive(built, archive)
    say(f"{archive} {reference} {_megabytes(built.layers)} MB")
    return archive


def _python(checkout: Checkout, say: Say) -> Layer:
    return _cached(checkout, "python", [], contents.python_files, say)[0]


def _dependencies(checkout: Checkout, say: Say) -> tuple[Layer, frozenset[str]]:
    lock = checkout.lock("runtime")

    def make(stage: Path) -> Files:
        return contents.dependency_files(stage, lock, checkout.uv)

    return _cached(checkout, "dependencies", [lock.read_bytes()], make, say)


def _engine(checkout: Checkout, below: frozenset[str], say: Say) -> Layer:
    lock, whole = checkout.lock("engine"), checkout.whole_engine

    def make(stage: Path) -> Files:
        return contents.engine_files(stage, lock, checkout.uv, below=below, whole=whole)

    inputs = [lock.read_bytes(), checkout.lock("runtime").read_bytes(), str(whole).encode()]
    return _cached(checkout, "engine", inputs, make, say)[0]


def _project(checkout: Checkout, say: Say) -> Layer:
    compiled: Path | None
    compiled = checkout.root / "build/compiled"
    try:
        hot_path.compiled_copy(checkout.root, compiled, say, checkout.optimize)
    except hot_path.CannotCompile as err:
        say(f"the EPP of these images uses a third more CPU per request: {err}")
        compiled = None
    with _stage(checkout) as stage:
        files = contents.project_files(stage, checkout.root, compiled)
        return write_layer(files, checkout.layers / "project.tar")


def _storage(checkout: Checkout) -> Layer:
    # Not cached: it has the project's code, and uv has the wheels.
    with _stage(checkout) as stage:
        lock = checkout.lock("vllm-storage")
        files = contents.storage_files(stage, checkout.root, lock, checkout.uv)
        return write_layer(files, checkout.layers / "vllm-storage.tar")


def _cached(
    checkout: Checkout,
    name: str,
    inputs: list[bytes],
    make: Callable[[Path], Files],
    say: Say,
) -> tuple[Layer, frozenset[str]]:
    """The layer `name` and the paths in it, from the cache if made from the same `inputs`.

    The Python version and the sources of this package count as inputs too.
    """
    key = hashlib.sha256(sys.version.encode())
    for source in sorted(_SOURCES.glob("*.py")):
        key.update(source.read_bytes())
    for content in inputs:
        key.update(hashlib.sha256(content).digest())
    record = checkout.layers / f"{name}.json"
    cached = json.loads(record.read_text()) if record.exists() else {}
    tar = checkout.layers / f"{name}.tar"
    if cached.get("key") != key.hexdigest() or not tar.exists():
        say(f"building layer {name} …")
        record.unlink(missing_ok=True)
        with _stage(checkout) as stage:
            files = make(stage)
            layer = write_layer(files, tar)
        cached = {"key": key.hexdigest(), "digest": layer.digest, "paths": sorted(files)}
        record.write_text(json.dumps(cached))
    return Layer(tar, cached["digest"], tar.stat().st_size), frozenset(cached["paths"])


@contextmanager
def _stage(checkout: Checkout) -> Iterator[Path]:
    """A temporary folder on the file system of the layers."""
    checkout.layers.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="stage-", dir=checkout.layers))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _megabytes(layers: Sequence[Layer]) -> int:
    return round(sum(layer.size for layer in layers) / 1e6)
