"""The image of vLLM's storage connector brings all that vLLM's image lacks, and nothing more."""

import ast
import re
import stat
import sys
import tarfile
from pathlib import Path

import pytest
from images import contents
from images.build import storage_image
from images.oci import write_archive, write_layer

from tandem_contract.vllm_storage import PACKAGES_PATH

from .archives import config
from .dockerfile import build_packages

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "images/tandem-vllm-storage.Dockerfile").read_text()
IN_VLLMS_IMAGE = {
    "aiohttp",
    "huggingface_hub",
    "msgspec",
    "prometheus_client",
    "torch",
    "vllm",
    "yarl",
}
"""Libraries that vLLM requires, and those that these require."""


def copied() -> dict[str, Path]:
    """The packages that the image copies from this repository."""
    lines = re.findall(r"^COPY (\S+/(tandem_\w+)) /packages/\2$", DOCKERFILE, re.MULTILINE)
    return {name: ROOT / folder for folder, name in lines}


def locked() -> set[str]:
    """The libraries that the image installs."""
    text = (ROOT / "requirements/vllm-storage.lock").read_text()
    return set(re.findall(r"^([\w-]+)==", text, re.MULTILINE))


def test_every_import_is_brought_or_is_vllms() -> None:
    reachable = reached("tandem_vllm_storage", copied())
    assert reachable - set(copied()) - set(sys.stdlib_module_names) == (IN_VLLMS_IMAGE | locked())


def test_nothing_of_vllm_or_torch_is_brought() -> None:
    assert locked() == {"obstore", "xxhash"}
    assert "--no-deps" in DOCKERFILE
    assert set(copied()) == {"tandem_contract", "tandem_kvstore", "tandem_vllm_storage"}


def test_the_entrypoint_copies_to_the_path_that_engines_import_from() -> None:
    assert 'ENTRYPOINT ["cp", "-R", "/packages/."]' in DOCKERFILE
    assert f'CMD ["{PACKAGES_PATH}"]' in DOCKERFILE


@pytest.mark.component
def test_the_archive_has_the_files_of_the_dockerfile_and_a_program_that_copies_them(
    tmp_path: Path,
) -> None:
    lock, uv = ROOT / "requirements/vllm-storage.lock", ROOT / ".venv-boot/bin/uv"
    layer = write_layer(
        contents.storage_files(tmp_path / "stage", ROOT, lock, uv), tmp_path / "layer.tar"
    )
    with tarfile.open(layer.path) as tar:
        members = {f"/{member.name}": member.mode for member in tar if member.isfile()}
    built = build_packages(tmp_path / "packages")
    expected = {f"{contents.PACKAGES}/{path.relative_to(built)}" for path in files_below(built)}
    assert {name for name in members if name.startswith(contents.PACKAGES)} == expected
    archive = tmp_path / "storage.tar"
    write_archive(storage_image("1", layer), archive)
    started = config(archive)
    assert started["Entrypoint"] == ["/usr/bin/cp", "-R", f"{contents.PACKAGES}/."]
    assert started["Cmd"] == [PACKAGES_PATH]
    assert members["/usr/bin/cp"] & stat.S_IXOTH


@pytest.mark.component
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_libraries_are_compiled_for_every_python_of_vllm(tmp_path: Path, machine: str) -> None:
    platform = f"{machine}-unknown-linux-gnu"
    packages = build_packages(tmp_path / "packages", "--python-platform", platform)
    pythons = [python.replace(".", "") for python in contents.VLLM_PYTHONS]
    assert sorted(file.name for file in packages.rglob("*.so")) == [
        # Compiled for every Python from 3.11 on.
        "_obstore.abi3.so",
        *(f"_xxhash.cpython-{python}-{machine}-linux-gnu.so" for python in pythons),
    ]
    assert not list(packages.rglob("*.pyc"))


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def reached(package: str, folders: dict[str, Path]) -> set[str]:
    """Top-level names that `package` imports, through modules of `folders` too."""
    names: set[str] = set()
    queue = [*folders[package].rglob("*.py")]
    for file in queue:
        for module in imports(file):
            names.add(module.partition(".")[0])
            found = source(module, folders)
            queue += [path for path in found if path not in queue]
    return names


def imports(file: Path) -> list[str]:
    """Dotted names of the modules that a file imports, relative ones resolved."""
    package = file.relative_to(next(p for p in file.parents if p.name.startswith("tandem_")).parent)
    parents = package.parts[:-1]
    modules = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parents[: len(parents) + 1 - node.level]) if node.level else ""
            name = ".".join(filter(None, (base, node.module)))
            # `from package import module` imports the module.
            modules += [name, *(f"{name}.{alias.name}" for alias in node.names)]
    return modules


def source(module: str, folders: dict[str, Path]) -> list[Path]:
    """The file of a module, and the `__init__` files of its packages."""
    top, *rest = module.split(".")
    if top not in folders:
        return []
    files, folder = [folders[top] / "__init__.py"], folders[top]
    for part in rest:
        files += [folder / f"{part}.py", folder / part / "__init__.py"]
        folder /= part
    return [file for file in files if file.is_file()]
