"""The CRDs on a real API server: accepted, equal to our own validation, usable with kubectl."""

import asyncio
import copy
import json
import re
import ssl
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from tandem_contract import labels
from tandem_kube.client import connect
from tandem_operator.crd import KINDS, RULES, load_crd, schema_version
from tandem_operator.resources.schema import defaulted, problems

from ..cluster.control_plane import ControlPlane
from ..cluster.kubectl import Failed
from .full_pools import FULL, changed
from .pool_yaml import DECODE, PREFILL, decode_pool, prefill_pool
from .test_cel import CASES
from .test_crd import nodes, root
from .test_schema import MALFORMED

pytestmark = pytest.mark.control_plane

EXAMPLES = Path(__file__).parents[2] / "examples"


async def answers(crds: ControlPlane, pools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The result of a strict server-side dry run of each: the object, or a Status."""
    async with await connect(crds.kubeconfig) as api:
        trust = api.configuration
        context = ssl.create_default_context(cafile=trust.ssl_ca_cert)
        context.load_cert_chain(trust.cert_file, trust.key_file)
    query = {"dryRun": "All", "fieldValidation": "Strict"}
    connector = aiohttp.TCPConnector(ssl=context, limit=8)
    async with aiohttp.ClientSession(crds.url, connector=connector) as http:

        async def answer(pool: dict[str, Any]) -> dict[str, Any]:
            plural = load_crd(pool["kind"])["spec"]["names"]["plural"]
            path = f"/apis/{labels.API_VERSION}/namespaces/default/{plural}"
            async with http.post(path, params=query, json=pool) as response:
                result: dict[str, Any] = await response.json()
                return result

        return await asyncio.gather(*(answer(pool) for pool in pools))


def refused(answer: dict[str, Any]) -> bool:
    return bool(answer["kind"] == "Status")


def valid(pool: dict[str, Any]) -> bool:
    return problems(pool["kind"], defaulted(pool["kind"], pool)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_server_accepts_the_crd_without_warnings(crds: ControlPlane, kind: str) -> None:
    crd = read(crds, "crd", load_crd(kind)["metadata"]["name"])
    conditions = {c["type"]: c["status"] for c in crd["status"]["conditions"]}
    assert conditions == {"NamesAccepted": "True", "Established": "True"}
    assert crd["metadata"]["annotations"][labels.SCHEMA_VERSION] == str(schema_version())


async def test_every_broken_rule_is_refused_with_the_same_message_and_field(
    crds: ControlPlane,
) -> None:
    results = await answers(crds, [data for _, data, _, _ in CASES])
    for (kind, data, _, _), answer in zip(CASES, results, strict=True):
        (problem,) = problems(kind, defaulted(kind, data))
        (cause,) = answer["details"]["causes"]
        assert cause["field"] == bracketed(problem.path)
        assert cause["message"] == f"Invalid value: {problem.message}"
        # What the cases use as a password.
        assert "hush" not in json.dumps(answer)


def bracketed(path: Sequence[str | int]) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


async def test_malformed_objects_are_refused(crds: ControlPlane) -> None:
    pools = [prefill_pool(**spec) for spec, _, _ in MALFORMED]
    results = await answers(crds, pools)
    assert [
        pool["spec"] for pool, answer in zip(pools, results, strict=True) if not refused(answer)
    ] == []


async def test_the_server_and_our_validation_agree_on_any_change(crds: ControlPlane) -> None:
    random = Random(1)
    pools = [*FULL, *(changed(random) for _ in range(200))]
    results = await answers(crds, pools)
    ours = [not valid(pool) for pool in pools]
    cases = zip(pools, results, ours, strict=True)
    assert [(pool, answer) for pool, answer, wrong in cases if wrong != refused(answer)] == []
    assert True in ours
    assert False in ours[len(FULL) :]


async def test_the_server_fills_in_the_same_defaults(crds: ControlPlane) -> None:
    pools = [PREFILL, DECODE, *FULL]
    for pool, stored in zip(pools, await answers(crds, pools), strict=True):
        assert stored["spec"] == defaulted(pool["kind"], pool)["spec"]


def test_every_example_passes_a_strict_dry_run(crds: ControlPlane, namespace: str) -> None:
    names = crds.kubectl(
        *("create", "--dry-run=server", "--validate=strict", f"--namespace={namespace}"),
        *("--output=name", f"--filename={EXAMPLES}"),
    )
    written = [text for file in EXAMPLES.glob("*.yaml") for text in file.read_text().split("\n---")]
    assert len(names.split()) == len(written)


@pytest.mark.parametrize("kind", KINDS)
def test_kubectl_explain_describes_every_field(crds: ControlPlane, kind: str) -> None:
    published = json.loads(crds.kubectl("get", "--raw", f"/openapi/v3/apis/{labels.API_VERSION}"))
    schemas = published["components"]["schemas"]
    schema = next(node for name, node in schemas.items() if name.endswith(f".{kind}"))
    described = {
        path
        for path, node in nodes(schema)
        # A field with more than a reference has its reference in allOf.
        if node.get("description")
    }
    ours = {path for path, _ in nodes(root(kind)) if not path.startswith(".metadata")}
    assert ours - described - {""} == set()


@pytest.mark.parametrize(
    ("path", "field"),
    [("prefillpool.spec.engine", "gpuMemoryUtilization"), ("pp.spec.model.source.tiny", "seed"),
     ("dp.spec.routing", "endpoint"), ("decodepool.status.conditions", "lastTransitionTime")],
)  # fmt: skip
def test_explain(crds: ControlPlane, path: str, field: str) -> None:
    text = crds.kubectl("explain", path)
    assert re.search(rf"^  {field}\t<", text, re.MULTILINE)


@pytest.fixture
def pair(crds: ControlPlane, namespace: str) -> tuple[ControlPlane, str]:
    """A pool of each kind, named p and d, with a status as the operator writes it."""
    create(crds, namespace, PREFILL, DECODE)
    for pool in ("pp/p", "dp/d"):
        patch_status(crds, namespace, pool, status())
    return crds, namespace


def create(crds: ControlPlane, namespace: str, *pools: dict[str, Any]) -> None:
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": pools})
    crds.kubectl("create", f"--namespace={namespace}", "--filename=-", input=listed)


def status() -> dict[str, Any]:
    ready = {
        "type": "Ready", "status": "True", "reason": "AllReady", "message": "3 of 3 pods are ready",
        "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1,
    }  # fmt: skip
    return {
        "model": "org/model", "tensorParallel": 1, "accelerator": "1xH100", "connector": "nixl",
        "replicas": 3, "desiredReplicas": 3, "readyReplicas": 3, "updatedReplicas": 2,
        "pairedReplicas": 1, "drainingReplicas": 0, "selector": f"{labels.POOL}=p",
        "currentRevision": "11111111", "updateRevision": "22222222", "observedGeneration": 1,
        "endpoint": "http://chat.default:8080", "conditions": [ready],
        "scaling": {"reason": "Queue", "lastTransition": "2026-01-01T00:00:00Z"},
    }  # fmt: skip


def patch_status(crds: ControlPlane, namespace: str, pool: str, value: dict[str, Any]) -> None:
    crds.kubectl(
        *("patch", pool, f"--namespace={namespace}", "--subresource=status", "--type=merge"),
        f"--patch={json.dumps({'status': value})}",
    )


def read(crds: ControlPlane, *what: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(crds.kubectl("get", *what, "--output=json"))
    return body


def test_columns(pair: tuple[ControlPlane, str]) -> None:
    crds, namespace = pair
    table = crds.kubectl("get", "pp,dp", f"--namespace={namespace}").split("\n\n")
    assert [part.splitlines()[0].split() for part in table] == [
        ["NAME", "MODEL", "DESIRED", "READY", "UP-TO-DATE", "PAIRED", "STATUS", "REASON", "AGE"]
    ] * 2
    wide = crds.kubectl("get", "pp,dp", "--output=wide", f"--namespace={namespace}")
    names, prefill, _, _, decode, *_ = [line.split() for line in wide.splitlines()]
    assert names[9:] == ["TP", "ACCEL", "CONNECTOR", "REVISION", "ENDPOINT"]
    assert prefill[0] == "prefillpool.tandem.dev/p"
    assert decode[0] == "decodepool.tandem.dev/d"
    for row in (prefill, decode):
        assert row[1:8] == ["org/model", "3", "3", "2", "1", "True", "AllReady"]
        assert row[9:] == ["1", "1xH100", "nixl", "11111111", "http://chat.default:8080"]


def test_the_category_names_both_kinds(pair: tuple[ControlPlane, str]) -> None:
    crds, namespace = pair
    names = crds.kubectl("get", "llm", "--output=name", f"--namespace={namespace}").split()
    assert names == ["decodepool.tandem.dev/d", "prefillpool.tandem.dev/p"]


@pytest.mark.parametrize("pool", ["pp/p", "dp/d"])
def test_wait_and_scale(pair: tuple[ControlPlane, str], pool: str) -> None:
    crds, namespace = pair
    in_namespace = f"--namespace={namespace}"
    # kubectl compares generations: a condition of an older one does not count.
    crds.kubectl("wait", "--for=condition=Ready", pool, in_namespace, "--timeout=10s")
    crds.kubectl("scale", pool, "--replicas=7", in_namespace)
    assert read(crds, pool, in_namespace)["spec"]["replicas"] == 7
    scale = read(crds, pool, in_namespace, "--subresource=scale")
    assert scale["spec"]["replicas"] == 7
    assert scale["status"] == {"replicas": 3, "selector": f"{labels.POOL}=p"}


def test_status_and_spec_are_written_separately(pair: tuple[ControlPlane, str]) -> None:
    crds, namespace = pair
    in_namespace = f"--namespace={namespace}"
    change = json.dumps({"spec": {"replicas": 5}, "status": {"readyReplicas": 99}})
    crds.kubectl("patch", "pp/p", in_namespace, "--type=merge", f"--patch={change}")
    after = read(crds, "pp/p", in_namespace)
    assert (after["spec"]["replicas"], after["status"]["readyReplicas"]) == (5, 3)
    assert after["metadata"]["generation"] == 2
    change = json.dumps({"spec": {"replicas": 6}, "status": {"readyReplicas": 4}})
    crds.kubectl(
        *(
            "patch",
            "pp/p",
            in_namespace,
            "--subresource=status",
            "--type=merge",
            f"--patch={change}",
        )
    )
    after = read(crds, "pp/p", in_namespace)
    assert (after["spec"]["replicas"], after["status"]["readyReplicas"]) == (5, 4)
    assert after["metadata"]["generation"] == 2


def test_conditions_are_merged_by_type(pair: tuple[ControlPlane, str]) -> None:
    crds, namespace = pair
    (ready,) = status()["conditions"]
    applied = {**PREFILL, "metadata": {"name": "p"}}
    applied["status"] = {"conditions": [{**ready, "type": "Draining", "status": "False"}]}
    del applied["spec"]
    crds.kubectl(
        *("apply", "--server-side", "--subresource=status", "--field-manager=another"),
        *(f"--namespace={namespace}", "--filename=-"),
        input=json.dumps(applied),
    )
    conditions = read(crds, "pp/p", f"--namespace={namespace}")["status"]["conditions"]
    assert [condition["type"] for condition in conditions] == ["Ready", "Draining"]


def test_scaling_a_pool_without_replicas(crds: ControlPlane, namespace: str) -> None:
    create(crds, namespace, prefill_pool(replicas=None))
    crds.kubectl("scale", "pp/p", "--replicas=3", f"--namespace={namespace}")
    assert read(crds, "pp/p", f"--namespace={namespace}")["spec"]["replicas"] == 3


def test_kubectl_scale_of_a_pool_with_scaling_is_refused_with_the_reason(
    crds: ControlPlane, namespace: str
) -> None:
    pool = decode_pool(replicas=None, scaling={"maxReplicas": 4})
    create(crds, namespace, pool)
    with pytest.raises(Failed, match=r"replicas"):
        crds.kubectl("scale", "dp/d", "--replicas=3", f"--namespace={namespace}")


def test_an_object_older_than_a_rule_can_be_changed_in_other_fields(
    crds: ControlPlane, namespace: str
) -> None:
    """A newer schema may refuse a stored value; until that field changes, the object works."""
    crd = copy.deepcopy(load_crd("PrefillPool"))
    group = f"{namespace}.example.com"
    crd["metadata"] = {"name": f"prefillpools.{group}"}
    crd["spec"]["group"] = group
    crd["spec"]["names"]["shortNames"] = crd["spec"]["names"]["categories"] = []
    lax = copy.deepcopy(crd)
    spec = lax["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    for _, node in nodes(spec):
        for limit in (RULES, "pattern", "enum"):
            node.pop(limit, None)
    old = prefill_pool(engine={"image": "vllm:latest", "tuning": "some"}, drain={"timeout": "2 m"})
    in_namespace, pool = f"--namespace={namespace}", f"prefillpools.{group}/p"
    establish(crds, lax)
    old["apiVersion"] = f"{group}/{labels.VERSION}"
    create(crds, namespace, old)
    establish(crds, crd)
    deadline = time.monotonic() + 30
    # The server uses a changed schema only a moment after it has stored it.
    while accepts(crds, namespace, old) and time.monotonic() < deadline:
        pass
    crds.kubectl("label", pool, in_namespace, "team=a")
    crds.kubectl("scale", pool, in_namespace, "--replicas=2")
    patch_status(crds, namespace, pool, status())
    change = json.dumps({"spec": {"engine": {"tuning": "none"}}})
    with pytest.raises(Failed, match=r"spec\.engine\.tuning"):
        crds.kubectl("patch", pool, in_namespace, "--type=merge", f"--patch={change}")
    crds.kubectl("delete", "crd", crd["metadata"]["name"], "--wait=false")


def accepts(crds: ControlPlane, namespace: str, pool: dict[str, Any]) -> bool:
    body = json.dumps({**pool, "metadata": {"name": "another"}})
    dry_run = ("create", "--dry-run=server", f"--namespace={namespace}", "--filename=-")
    try:
        crds.kubectl(*dry_run, input=body)
    except Failed:
        return False
    return True


def establish(crds: ControlPlane, crd: dict[str, Any]) -> None:
    crds.kubectl("apply", "--server-side", "--filename=-", input=json.dumps(crd))
    crds.wait_until_established(f"crd/{crd['metadata']['name']}")
