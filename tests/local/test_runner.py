import asyncio
from pathlib import Path

import aiohttp
import pytest

from tandem_local.errors import SetupError, StartFailed
from tandem_local.runner import Runner

from .pods import container, get, group_is_gone, pod, until

pytestmark = pytest.mark.component


async def test_two_pods_have_the_same_port_on_different_addresses(runner: Runner) -> None:
    pods = runner.add([pod("a"), pod("b")])
    runner.start(pods)
    await runner.wait_ready(pods)
    me = [await get(p.spec.address, "/me") for p in pods]
    assert pods[0].spec.address != pods[1].spec.address
    assert [m["env"]["POD_IP"] for m in me] == [p.spec.address for p in pods]
    groups = [pid for p in pods for pid in p.pids.values()]
    await runner.stop()
    await until(lambda: all(group_is_gone(group) for group in groups))


async def test_variables_and_mount_paths_are_resolved(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    web = container(
        args=("--keys=/var/keys/k1", "/models/x/y", "$(SCRATCH)", "$$(NAME)", "$(UNKNOWN)"),
        env=[
            {"name": "SCRATCH", "value": "/scratch/$(NAME)"},
            {"name": "UID_", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
            {"name": "LABEL", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['a/b']"}}},
        ],
        volumeMounts=[
            {"name": "keys", "mountPath": "/var/keys", "readOnly": True},
            {"name": "model", "mountPath": "/models/x"},
            {"name": "scratch", "mountPath": "/scratch"},
        ],
    )
    volumes = [
        {"name": "keys", "secret": {"secretName": "plan-keys"}},
        {"name": "model", "hostPath": {"path": str(tmp_path / "model"), "type": "Directory"}},
        {"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}},
    ]
    pods = runner.add([pod("a", web, volumes=volumes)])
    runner.start(pods)
    await runner.wait_ready(pods)
    me = await get(pods[0].spec.address, "/me")
    scratch = tmp_path / "run/pods/a/volumes/scratch"
    assert me["argv"] == [
        f"--keys={tmp_path}/keys/k1",
        f"{tmp_path}/model/y",
        f"{scratch}/web",
        "$(NAME)",
        "$(UNKNOWN)",
    ]
    assert scratch.is_dir()
    assert (me["env"]["UID_"], me["env"]["LABEL"]) == ("uid-a", "c")


async def test_a_sidecar_starts_first_and_stops_last(runner: Runner, tmp_path: Path) -> None:
    events = {"name": "EVENTS", "value": str(tmp_path / "events")}
    hook = {"httpGet": {"path": f"/touch?{tmp_path}/events", "port": 8000}}
    side = container(
        "side", 8001, env=[events], restartPolicy="Always",
        startupProbe={"httpGet": {"path": "/", "port": 8001}, "failureThreshold": 30},
    )  # fmt: skip
    # Fails unless the sidecar accepts connections before this init container starts.
    probe = "import os, socket; socket.create_connection((os.environ['POD_IP'], 8001)).close()"
    once = container("once", command=["python", "-c", probe])
    main = container("main", env=[events], lifecycle={"preStop": hook})
    pods = runner.add([pod("a", main, initContainers=[side, once])])
    runner.start(pods)
    await runner.wait_ready(pods)
    await runner.stop()
    written = (tmp_path / "events").read_text().splitlines()
    assert written == ["prestop main", "sigterm main", "sigterm side"]


@pytest.mark.parametrize("starts", [True, False])
async def test_a_pre_stop_hook_that_fails_is_reported_of_started_containers_only(
    runner: Runner, caplog: pytest.LogCaptureFixture, starts: bool
) -> None:
    caplog.set_level("WARNING", logger="tandem_local.container")
    command = ["true"] if starts else ["false"]
    main = container(
        "main", 8000, lifecycle={"preStop": {"exec": {"command": ["false"]}}},
        startupProbe={"exec": {"command": command}, "failureThreshold": 600},
    )  # fmt: skip
    pods = runner.add([pod("a", main)])
    runner.start(pods)
    if starts:
        await runner.wait_ready(pods)
    else:
        await until(lambda: bool(pods[0].pids))
    await runner.stop()
    lines = [r.getMessage() for r in caplog.records if r.name == "tandem_local.container"]
    assert any("preStop hook failed" in line for line in lines) is starts


async def test_a_crashed_container_is_restarted(runner: Runner) -> None:
    pods = runner.add([pod("a")])
    runner.start(pods)
    await runner.wait_ready(pods)
    first = await get(pods[0].spec.address, "/me")
    with pytest.raises(aiohttp.ClientError):
        await get(pods[0].spec.address, "/exit?3")
    await until(lambda: not pods[0].ready)
    await until(lambda: pods[0].ready)
    assert pods[0].restarts == 1
    assert (await get(pods[0].spec.address, "/me"))["pid"] != first["pid"]


async def test_a_pod_whose_container_is_not_restarted_is_replaced(runner: Runner) -> None:
    uid = {"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
    side = container("side", 8001, restartPolicy="Always")
    document = pod("a", container(env=[uid]), initContainers=[side], restartPolicy="Never")
    del document["metadata"]["uid"]
    pods = runner.add([document])
    runner.start(pods)
    await runner.wait_ready(pods)
    address = pods[0].spec.address
    first, first_side = await get(address, "/me"), await get(address, "/me", 8001)
    with pytest.raises(aiohttp.ClientError):
        await get(address, "/exit?0")
    await until(lambda: pods[0].restarts == 1 and pods[0].ready)
    second, second_side = await get(address, "/me"), await get(address, "/me", 8001)
    assert first["env"]["POD_UID"] != second["env"]["POD_UID"]
    assert first_side["pid"] != second_side["pid"]


async def test_what_is_left_of_a_pod_that_ended_has_the_pods_grace_period(tmp_path: Path) -> None:
    """A sidecar whose engine died moves its streams to another engine."""
    runner, done = Runner(tmp_path / "run", stop_timeout=0.01), tmp_path / "done"
    last = {"exec": {"command": ["sh", "-c", f"sleep 0.5; touch {done}"]}}
    side = container("side", 8001, restartPolicy="Always", lifecycle={"preStop": last})
    pods = runner.add([pod("a", container(), initContainers=[side], restartPolicy="Never")])
    runner.start(pods)
    await runner.wait_ready(pods)
    with pytest.raises(aiohttp.ClientError):
        await get(pods[0].spec.address, "/exit?1")
    await until(lambda: pods[0].restarts == 1)
    assert done.exists()
    await runner.stop()


async def test_a_failed_liveness_probe_restarts_the_container(
    runner: Runner, tmp_path: Path
) -> None:
    alive = tmp_path / "alive"
    alive.touch()
    check = {"exec": {"command": ["test", "-e", str(alive)]}}
    web = container(livenessProbe={**check, "periodSeconds": 0.05, "failureThreshold": 1})
    pods = runner.add([pod("a", web)])
    runner.start(pods)
    await runner.wait_ready(pods)
    alive.unlink()
    await until(lambda: pods[0].containers[0].exit_code is not None)
    alive.touch()
    await until(lambda: pods[0].restarts > 0 and pods[0].ready)
    assert "liveness" in pods[0].containers[0].reason


async def test_readiness_follows_the_probe(runner: Runner, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    probe = {"exec": {"command": ["test", "-e", str(flag)]}, "periodSeconds": 0.05}
    pods = runner.add([pod("a", container(readinessProbe={**probe, "failureThreshold": 1}))])
    runner.start(pods)
    await until(lambda: pods[0].containers[0].started)
    assert not pods[0].ready
    flag.touch()
    await runner.wait_ready(pods)
    flag.unlink()
    await until(lambda: not pods[0].ready)
    assert pods[0].restarts == 0


async def test_a_container_that_exits_during_start_is_reported_with_its_log(runner: Runner) -> None:
    failing = container(
        "bad", command=["python", "-c", "print('no such model'); raise SystemExit(7)"]
    )
    pods = runner.add([pod("a", failing), pod("b")])
    runner.start(pods)
    with pytest.raises(StartFailed) as failure:
        await runner.wait_ready(pods)
    assert str(failure.value).startswith("a/bad: exited with code 7; its log, ")
    assert str(failure.value).endswith(":\n  | no such model")


async def test_a_container_that_never_becomes_ready_is_named(runner: Runner) -> None:
    pods = runner.add([pod("a", container(readinessProbe={"exec": {"command": ["false"]}}))])
    runner.start(pods)
    with pytest.raises(StartFailed, match="a/web: not ready after 1 s"):
        await runner.wait_ready(pods, timeout=1)


async def test_a_failed_startup_probe_is_given_as_the_reason(runner: Runner) -> None:
    probe = {"tcpSocket": {"port": 1}, "periodSeconds": 0.1, "failureThreshold": 1}
    pods = runner.add([pod("a", container(startupProbe=probe))])
    runner.start(pods)
    with pytest.raises(StartFailed, match="its startup probe failed"):
        await runner.wait_ready(pods)


async def test_a_container_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    runner = Runner(tmp_path / "run", stop_timeout=0.2)
    pods = runner.add([pod("a", container(args=("--stubborn", "--grandchild")))])
    runner.start(pods)
    await runner.wait_ready(pods)
    group = pods[0].pids["web"]
    await runner.stop()
    await until(lambda: group_is_gone(group))


async def test_stopping_during_start_leaves_no_process(runner: Runner) -> None:
    slow = container("slow", readinessProbe={"exec": {"command": ["sleep", "600"]}})
    slow["readinessProbe"]["timeoutSeconds"] = 600
    pods = runner.add([pod("a", slow)])
    runner.start(pods)
    await until(lambda: bool(pods[0].pids))
    groups = list(pods[0].pids.values())
    await runner.stop()
    await until(lambda: all(group_is_gone(group) for group in groups))
    # The task of a killed probe may end some turns of the event loop after its process.
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})


async def test_a_downward_api_volume_has_the_annotation_and_its_changes(
    runner: Runner, tmp_path: Path
) -> None:
    item = {"path": "f/x.yaml", "fieldRef": {"fieldPath": "metadata.annotations['a/b']"}}
    volumes = [{"name": "v", "downwardAPI": {"items": [item]}}]
    mount = {"name": "v", "mountPath": "/etc/flags", "readOnly": True}
    document = pod(
        "a", container(args=("/etc/flags/f/x.yaml",), volumeMounts=[mount]), volumes=volumes
    )
    document["metadata"]["annotations"] = {"a/b": "before"}
    document["spec"]["restartPolicy"] = "Never"
    pods = runner.add([document])
    runner.start(pods)
    await runner.wait_ready(pods)
    me = await get(pods[0].spec.address, "/me")
    file = Path(me["argv"][0])
    assert file.is_relative_to(tmp_path)
    assert file.read_text() == "before"
    changed = {**document, "metadata": {**document["metadata"], "annotations": {"a/b": "after"}}}
    runner.replace_annotations([changed])
    assert file.read_text() == "after"
    # The same process still runs; the pod that replaces it starts with the present value.
    assert (await get(pods[0].spec.address, "/me"))["pid"] == me["pid"]
    with pytest.raises(aiohttp.ClientError):
        await get(pods[0].spec.address, "/exit?1")
    await until(lambda: pods[0].restarts > 0 and pods[0].ready)
    assert file.read_text() == "after"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {
                "volumes": [
                    {
                        "name": "v",
                        "downwardAPI": {
                            "items": [{"path": "x", "fieldRef": {"fieldPath": "metadata.uid"}}]
                        },
                    }
                ]
            },
            "volume v: fieldRef metadata.uid: the local runner supports metadata.labels",
        ),
        (
            {"hostNetwork": True},
            "pod a: spec.hostNetwork: the local runner does not support this field",
        ),
        (
            {"volumes": [{"name": "v", "nfs": {}}]},
            r"spec.volumes\[0\].nfs: the local runner",
        ),
        ({"volumes": [{"name": "v"}]}, "volume v: the local runner supports emptyDir"),
        ({"volumes": [{"name": "v", "secret": {"secretName": "x"}}]}, "secret 'x' does not exist"),
        (
            {"volumes": [{"name": "v", "hostPath": {"path": "/no/such"}}]},
            "/no/such does not exist on this machine: create it",
        ),
        ({"containers": "web"}, "spec.containers: the local runner does not support"),
    ],
)
async def test_pods_with_unsupported_fields_are_refused(
    runner: Runner, spec: object, message: str
) -> None:
    document = pod("a")
    document["spec"].update(spec)
    with pytest.raises(SetupError, match=message):
        runner.add([document])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"command": None}, "web: image python:3.11 cannot be run as a process"),
        ({"command": ["no-such-program"]}, "no-such-program .* is not on PATH"),
        ({"readinessProbe": {"grpc": {"port": 1}}}, r"containers\[0\].readinessProbe.grpc"),
        ({"readinessProbe": {"httpGet": {"port": "x"}}}, "no port .* is named 'x'"),
        ({"volumeMounts": [{"name": "x", "mountPath": "/x"}]}, "no volume is named 'x'"),
        ({"resources": {"limits": {"nvidia.com/gpu": "99"}}}, "asks for 99 nvidia.com/gpu"),
        ({"resources": {"limits": {"rdma/hca": "1"}}}, "asks for rdma/hca"),
        ({"ports": [{"containerPort": "x"}]}, "pod a: not a valid Pod: "),
    ],
)
async def test_unsupported_containers_are_refused(
    runner: Runner, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(SetupError, match=message):
        runner.add([pod("a", container(**fields))])


async def test_two_pods_with_one_name_are_refused(runner: Runner) -> None:
    with pytest.raises(SetupError, match="pod a: two pods have this name"):
        runner.add([pod("a"), pod("a")])


async def test_fields_that_only_matter_on_kubernetes_are_ignored(runner: Runner) -> None:
    document = pod(
        "a",
        container(securityContext={"runAsUser": 1}, imagePullPolicy="Never"),
        nodeSelector={"x": "y"},
        tolerations=[{"operator": "Exists"}],
        affinity={"podAffinity": {}},
    )
    assert runner.add([document])[0].spec.name == "a"
