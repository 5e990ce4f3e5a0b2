"""Everything on a whole Kubernetes: install, serve, change, upgrade, uninstall.

One installation serves all tests of this module; each leaves it as it found it, but for the last,
which removes it.
"""

import asyncio
import json
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme

from tandem_contract import labels, ports
from tandem_contract.paths import RoutingPath
from tandem_contract.vllm_storage import PACKAGES_PATH
from tandem_loadtest.records import Outcome
from tests.cluster.node import Node
from tests.operator.fake_hub import COMMIT, REPOSITORY

from . import downloaded, secured, stored
from .benched import CLIENTS, benched
from .changing import load
from .client import MODEL, Answer, chat
from .downloaded import Download
from .enforcing import enforced, forget_connections
from .site import CHART, QUICKSTART, RELEASE, SECONDS, SYSTEM, TEAM, Site, prompt, until
from .stranger import Place, listening, reachable, reachable_from, stranger

pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]

# Long enough for a test to act on the pod of a running stream: a fast machine generates 1,200
# tokens in less time than two calls of kubectl take.
_LONG_STREAM_TOKENS = 3000
_DECODE = f"{labels.POOL}=quickstart"


@pytest.fixture(scope="module")
def site(node: Node) -> Iterator[Site]:
    """The chart installed and the quickstart's pools ready, under restricted pod security."""
    deployed = Site(node)
    try:
        deployed.install()
        deployed.kubectl("apply", f"--filename={QUICKSTART}")
        deployed.ready()
        until(deployed.is_reachable, "a connection to Envoy's Service")
        yield deployed
    finally:
        deployed.clear()


def test_hands_off_and_answers_as_one_engine_does(site: Site) -> None:
    # On a busy node one engine is predicted to answer a short prompt sooner.
    question = prompt(2400)
    answer = chat(site.address, question)
    assert answer.status == 200, answer.text
    assert answer.path == RoutingPath.PREFILL_THEN_DECODE
    assert answer.text == chat(site.prefill_address(), question).text


def test_a_pools_status_has_the_endpoint_address(site: Site) -> None:
    pool = site.get("decodepool", "quickstart")
    assert pool["status"]["endpoint"] == f"http://quickstart.{TEAM}.svc:8080"
    wide = site.kubectl("get", "prefillpools,decodepools", "--output=wide")
    assert "tiny-llama" in wide


def test_scaling_down_ends_no_stream(site: Site) -> None:
    streams = site.streams(4, tokens=_LONG_STREAM_TOKENS)
    site.kubectl("scale", "decodepool/quickstart", "--replicas=1")
    until(lambda: len(site.pods(f"{labels.ROLE}=decode")) == 1, "one decode pod")
    assert not any(stream.whole for stream in streams), (
        "the streams ended before the test acted: use more tokens"
    )
    assert [stream.finished().ended for stream in streams] == ["[DONE]"] * 4
    site.kubectl("scale", "decodepool/quickstart", "--replicas=2")
    site.ready()


def test_answers_while_the_picker_is_away(site: Site) -> None:
    pickers = f"{labels.ENDPOINT}=quickstart,{labels.COMPONENT}=epp"
    before = set(site.pods(pickers).values())
    site.kubectl("delete", "pod", f"--selector={pickers}", "--wait=false", "--grace-period=1")

    def answered_until_back() -> bool:
        answer = chat(site.address, prompt(60))
        assert answer.status == 200, answer.text
        pods = site.get("pods", f"--selector={pickers}")["items"]
        is_replaced = not {pod["metadata"]["uid"] for pod in pods} & before
        return is_replaced and bool(pods) and all(_is_ready(pod) for pod in pods)

    until(answered_until_back, "another picker")


@pytest.fixture
def without_operator(site: Site) -> Iterator[None]:
    """The operator scaled to zero; back at the end, also of a test that failed."""
    site.scale_operator(0)
    try:
        yield
    finally:
        site.scale_operator(1)
        site.ready()


@pytest.mark.usefixtures("without_operator")
def test_drains_while_the_operator_is_away(site: Site) -> None:
    streams = site.streams(4, tokens=_LONG_STREAM_TOKENS)
    leaving = streams[0].decode
    assert leaving is not None
    site.kubectl("delete", "pod", leaving, "--wait=false")
    assert not streams[0].whole, "the stream ended too early: use more tokens"
    assert [stream.finished().ended for stream in streams] == ["[DONE]"] * 4
    site.kubectl("wait", "--for=delete", f"pod/{leaving}", f"--timeout={SECONDS}s")
    site.scale_operator(1)
    until(lambda: len(site.pods(f"{labels.ROLE}=decode")) == 2, "the pod's replacement")
    site.ready()


def test_a_changed_setting_reaches_running_sidecars(site: Site) -> None:
    """The kubelet writes the pod's annotation into the sidecar's file when it synchronizes the pod;
    how soon is printed."""
    before, started = site.engines, time.monotonic()
    patch = {"spec": {"sidecar": {"retries": 1}}}
    site.kubectl("patch", "decodepool/quickstart", "--type=merge", f"--patch={json.dumps(patch)}")
    decodes = site.pods(f"{labels.ROLE}=decode")

    def have_reloaded() -> bool:
        logs = [site.kubectl("logs", pod, "--container=sidecar") for pod in decodes]
        return all("settings reloaded: --retries 2 -> 1" in log for log in logs)

    until(have_reloaded, "every sidecar to have the new setting")
    print(f"after {time.monotonic() - started:.1f} s {len(decodes)} sidecars had the new setting")
    assert site.engines == before


def _handed_off(address: str, model: str = MODEL) -> tuple[str, Answer]:
    """A prompt to an Envoy that was handed off, and its answer.

    Several at the same time, and again: from what it has learned on a busy node, the EPP may
    predict that a decode pod answers a prompt sooner by itself.
    """
    handed_off: list[tuple[str, Answer]] = []

    def is_one_handed_off() -> bool:
        prompts = [prompt(2400) for _ in range(4)]
        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(threads.map(partial(chat, address, model=model), prompts))
        assert {answer.status for answer in answers} == {200}, answers
        for question, answer in zip(prompts, answers, strict=True):
            if answer.path == RoutingPath.PREFILL_THEN_DECODE:
                handed_off.append((question, answer))
        return bool(handed_off)

    until(is_one_handed_off, "a prompt to be handed off")
    return handed_off[0]


@pytest.mark.usefixtures("kube_router_program")
def test_policies_let_another_team_reach_envoy_only_and_let_hand_offs_pass(site: Site) -> None:
    pods = site.get("pods", f"--selector={labels.POOL}")["items"]
    places = listening(site.node, pods)
    print("pools' pods listen on", places)
    # The sidecar with /drain, raw engines, the side channel and KV events are among them.
    assert {port for _, port in places} >= {
        ports.SIDECAR, ports.SIDECAR_ADMIN, ports.ENGINE_DECODE, ports.SIDE_CHANNEL,
        ports.KV_EVENTS,
    }  # fmt: skip
    host, port = site.address.split(":")
    envoy = (host, int(port))
    image = next(pod["spec"]["initContainers"] for pod in pods if "initContainers" in pod["spec"])
    with stranger(site.node, image[0]["image"]):
        # Without enforcement everything is open: what follows is due to the policies.
        assert reachable(site.node, [*places, envoy]) == [*places, envoy]
        with enforced(site.node):
            until(lambda: reachable(site.node, [*places, envoy]) == [envoy], "only Envoy open")
            forget_connections(site.node)
            question, answer = _handed_off(site.address)
    assert answer.text == chat(site.prefill_address(), question).text


@pytest.fixture(scope="module")
def download(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Download]:
    """Pools whose model was downloaded from a hub that has ended."""
    try:
        yield asyncio.run(downloaded.create(site, tmp_path_factory.mktemp("hub")))
    finally:
        downloaded.remove(site)


def test_engines_start_from_a_cache_that_a_job_has_filled(site: Site, download: Download) -> None:
    assert download.partly["commit"] == COMMIT
    assert download.partly["bytes"] == download.files["model.safetensors"]
    assert download.partly["totalBytes"] == sum(download.files.values())
    assert not download.early_pods
    assert download.requests == dict.fromkeys(download.files, 1)
    for pod, port in zip(downloaded.ready_pods(site), (8000, 8200), strict=True):
        arguments = pod["spec"]["containers"][0]["args"]
        assert arguments[arguments.index("--revision") + 1] == COMMIT
        answer = chat(f"{pod['status']['podIP']}:{port}", "hello", model=REPOSITORY)
        assert answer.status == 200, answer.text


@pytest.mark.usefixtures("download", "kube_router_program")
def test_policies_open_ucxs_ports_inside_a_set_only(site: Site) -> None:
    prefill, decode = downloaded.ready_pods(site)
    from_prefill = (prefill["metadata"]["name"], TEAM)
    (other, *_) = site.pods(f"{labels.POOL}=quickstart")
    address = decode["status"]["podIP"]
    # The first and the last port of the range; the one after it listens, too.
    first, last, outside = ((address, port) for port in (20000, 20999, 21000))
    places = [first, last, outside]
    for pod in (from_prefill, (other, TEAM)):
        assert reachable_from(site.node, pod, places) == places
    with enforced(site.node):
        until(
            lambda: reachable_from(site.node, from_prefill, places) == [first, last],
            "the range open to the set",
        )
        until(lambda: not reachable_from(site.node, (other, TEAM), places), "no other port open")


@pytest.fixture(scope="module")
def store(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A store, a set of pools whose KV moves through it, and a vLLM pool."""
    try:
        stored.create(site, tmp_path_factory.mktemp("stored"))
        yield
    finally:
        stored.remove(site)


@pytest.mark.usefixtures("store")
def test_an_init_container_brings_the_storage_connector_to_an_image_without_it(site: Site) -> None:
    files: list[str] = []

    def works() -> bool:
        nonlocal files
        has_worked, detail, files = stored.used_packages(site)
        print(detail)
        return bool(has_worked)

    # Until kube-proxy has set up the store's Service, packets to it are lost.
    until(works, "the packages to write to the store and read it")
    assert files
    assert [file for file in files if not file.startswith(f"{PACKAGES_PATH}/")] == []


@pytest.mark.usefixtures("store", "kube_router_program")
def test_kv_moves_through_a_store_between_engines_that_cannot_connect(site: Site) -> None:
    prefill, decode = stored.ready_pods(site)
    until(lambda: site.is_reachable(stored.DECODE), "a connection to Envoy's Service")
    requests = (prefill["status"]["podIP"], ports.ENGINE_PREFILL)
    directions = [
        ((decode["metadata"]["name"], TEAM), listening(site.node, [prefill])),
        ((prefill["metadata"]["name"], TEAM), listening(site.node, [decode])),
    ]

    def open_places() -> list[list[Place]]:
        return [reachable_from(site.node, pod, places) for pod, places in directions]

    assert open_places() == [places for _, places in directions]
    with enforced(site.node):
        until(lambda: open_places() == [[requests], []], "only requests to the prefill engine open")
        forget_connections(site.node)
        question, answer = _handed_off(site.envoy(stored.DECODE), stored.MODEL)
    alone = chat(f"{requests[0]}:{requests[1]}", question, model=stored.MODEL)
    assert answer.text == alone.text
    assert stored.loaded_tokens(decode) > 0


@pytest.mark.usefixtures("store")
def test_the_status_says_whether_the_store_answers_and_bounds_change_live(site: Site) -> None:
    before, address = site.engines, site.envoy(stored.DECODE)
    stored.scale_store(site, 0)
    patch = '{"spec": {"transfer": {"storage": {"capacity": "1Gi", "maxAge": "24h"}}}}'
    site.kubectl("patch", f"prefillpool/{stored.PREFILL}", "--type=merge", f"--patch={patch}")

    def is_unreachable() -> bool:
        # Engines learn from their requests that the store is gone; all are answered.
        assert chat(address, prompt(2400), model=stored.MODEL).status == 200
        return stored.reachable(site)[0] == "False"

    until(is_unreachable, "StorageReachable to be False")
    print(stored.reachable(site)[1])
    until(lambda: stored.have_read(site, 1 << 30, 86400.0), "the engines to read the bounds")
    stored.scale_store(site, 1)
    until(lambda: stored.reachable(site)[0] == "True", "StorageReachable to be True")
    assert site.engines == before


@pytest.fixture(scope="module")
def authority(site: Site) -> Iterator[trustme.CA]:
    """That of a set of pools behind mutual TLS."""
    # A fourth set would ask for more than two CPUs, and some of its pods would not start.
    downloaded.remove(site)
    stored.remove(site)
    ca = trustme.CA()
    try:
        secured.create(site, ca)
        yield ca
    finally:
        secured.remove(site)


def test_pods_behind_mutual_tls_hand_off_and_refuse_strangers(
    site: Site, authority: trustme.CA
) -> None:
    until(lambda: site.is_reachable(secured.DECODE), "a connection to Envoy's Service")

    def is_handed_off() -> bool:
        answer = chat(site.envoy(secured.DECODE), prompt(2400), model=secured.MODEL)
        assert answer.status == 200, answer.text
        # Only the EPP's plan makes it a hand-off: Envoy's fallback sends none.
        return answer.path == RoutingPath.PREFILL_THEN_DECODE

    until(is_handed_off, "a hand-off")
    places = secured.servers(site)
    assert len(places) >= 2
    for place in places:
        # TLS 1.3 refuses a client without a certificate when it reads.
        assert b"HTTP" not in _get(place, ssl._create_unverified_context())
        with socket.create_connection(place, timeout=SECONDS) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert not plain.recv(100).startswith(b"HTTP/1.1 200")


def test_a_renewed_certificate_loses_no_request_on_the_node(
    site: Site, authority: trustme.CA
) -> None:
    address, sidecar = site.envoy(secured.DECODE), secured.servers(site)[0]
    pods, client = site.engines, secured.client(authority)
    first = _certificate(sidecar, client)
    secured.renew(site, authority)

    def is_renewed() -> bool:
        # The kubelet updates a mounted Secret within about a minute.
        answer = chat(address, prompt(), model=secured.MODEL)
        assert answer.status == 200, answer.text
        return _certificate(sidecar, client) != first

    until(is_renewed, "the renewed certificate")
    assert chat(address, prompt(), model=secured.MODEL).status == 200
    assert site.engines == pods


def _certificate(place: Place, client: ssl.SSLContext) -> bytes | None:
    with (
        socket.create_connection(place, timeout=SECONDS) as plain,
        client.wrap_socket(plain) as connection,
    ):
        return connection.getpeercert(binary_form=True)


def _get(place: Place, client: ssl.SSLContext) -> bytes:
    """The beginning of the answer to a request; empty if the server refuses the client."""
    try:
        with (
            socket.create_connection(place, timeout=SECONDS) as plain,
            client.wrap_socket(plain) as connection,
        ):
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            return connection.recv(100)
    except (ssl.SSLError, ConnectionError):
        return b""


REQUESTS = 1110


def test_no_request_is_lost_while_everything_changes(site: Site) -> None:
    # Its pods would leave no room for one more of the quickstart's.
    secured.remove(site)
    with load(site.address) as running:
        running.wait_for(20)
        for replicas in (3, 2):
            _scale(site, replicas)
        _roll_out(site)
        for forced in (False, True):
            _delete_one(site, forced=forced)
        with load(site.address, clients=30) as overload:
            site.helm("upgrade", RELEASE, CHART, "--set=operator.replicas=2", "--wait")
            overload.wait_for(60)
        running.wait_for(REQUESTS - overload.answered)
    site.helm("upgrade", RELEASE, CHART, "--set=operator.replicas=1", "--wait")
    assert (running.lost, overload.lost) == ([], [])
    assert running.answered + overload.answered >= REQUESTS


def test_behind_envoy_streams_end_by_forced_deletions_only(site: Site, tmp_path: Path) -> None:
    with benched(site.address, tmp_path / "drained") as drained:
        _delete_one(site, forced=False)
    assert {*drained.outcomes} == {Outcome.OK}
    with benched(site.address, tmp_path / "killed") as killed:
        _delete_one(site, forced=True)
    # The sidecar may be killed before it can write an error event: then the connection breaks.
    assert killed.failures <= {Outcome.IN_BAND_ERROR, Outcome.CONNECTION_LOST}
    assert killed.outcomes[Outcome.OK]
    lost = sum(killed.outcomes[failure] for failure in killed.failures)
    assert lost <= CLIENTS, "streams of other pods than the deleted one"


def test_behind_the_router_streams_survive_changes_of_every_kind(
    site: Site, tmp_path: Path
) -> None:
    """Also a forced deletion, after which nothing drains."""
    engines = site.engines
    with load(site.address) as changed:
        changed.wait_for(10)
        _set_front(site, front="router")
        changed.wait_for(changed.answered + 10)
    # Neither change of the front restarts an engine.
    assert site.engines == engines
    with benched(site.address, tmp_path / "bench") as streams:
        _roll_out(site)
        for replicas in (3, 2):
            _scale(site, replicas)
        for forced in (False, True):
            _delete_one(site, forced=forced)
    assert {*streams.outcomes} == {Outcome.OK}
    _empty_in_seconds(site)
    engines = site.engines
    with load(site.address) as back:
        back.wait_for(10)
        _set_front(site, front=None)
        back.wait_for(back.answered + 10)
    assert (changed.lost, back.lost) == ([], [])
    assert site.engines == engines


def _scale(site: Site, replicas: int) -> None:
    site.kubectl("scale", "decodepool/quickstart", f"--replicas={replicas}")
    until(lambda: len(site.pods(_DECODE)) == replicas, f"{replicas} decode pods")
    site.ready()


def _roll_out(site: Site) -> None:
    """Replace the pods of both pools."""
    for pool in ("decodepool/quickstart", "prefillpool/quickstart-prefill"):
        before = set(site.engines)
        site.kubectl("annotate", "--overwrite", pool, f"tandem.dev/restartedAt={time.time()}")
        until(lambda old=before: bool(set(site.engines) - old), "a pod of the new revision")
        site.kubectl("wait", "--for=condition=Progressing=False", f"--timeout={SECONDS}s", pool)
        site.ready()


def _delete_one(site: Site, *, forced: bool) -> None:
    """Delete a decode pod; not `forced`: as a drain of its node does."""
    victim = min(site.pods(_DECODE))
    how = ("--grace-period=0", "--force") if forced else ()
    site.kubectl("delete", "pod", victim, "--wait=false", *how)
    until(lambda: victim not in site.pods(_DECODE), f"the end of {victim}")
    site.ready()


def _empty_in_seconds(site: Site) -> None:
    """A pod that is deleted is gone before the streams that ran there have ended."""
    streams = site.streams(20, tokens=600)
    victim, started = streams[0].decode, time.monotonic()
    site.kubectl("delete", "pod", str(victim), "--wait=false")
    assert not any(stream.whole for stream in streams), "too early: use more tokens"
    site.kubectl("wait", "--for=delete", f"pod/{victim}", f"--timeout={SECONDS}s")
    left = sum(not stream.whole for stream in streams)
    print(f"{victim} gone after {time.monotonic() - started:.1f} s, {left} streams left")
    assert [stream.finished().ended for stream in streams] == ["[DONE]"] * 20
    site.ready()


def _set_front(site: Site, *, front: str | None) -> None:
    """Change `spec.routing.front`, and wait until the endpoint's front is the one it asks for."""
    patch = json.dumps({"spec": {"routing": {"front": front}}})
    site.kubectl("patch", "decodepool/quickstart", "--type=merge", f"--patch={patch}")
    front = front or "envoy"

    def serves() -> bool:
        selector = site.get("service", "quickstart")["spec"]["selector"]
        return bool(selector[labels.COMPONENT] == front)

    until(serves, f"{front} to be the front")
    other = {"envoy": "router", "router": "envoy"}[front]
    gone = f"--selector={labels.ENDPOINT}=quickstart,{labels.COMPONENT}={other}"
    site.kubectl("wait", "pods", gone, "--for=delete", f"--timeout={SECONDS}s")


def test_helm_test(site: Site) -> None:
    assert "Phase:          Succeeded" in site.helm("test", RELEASE)


def test_upgrade_restarts_no_engine(site: Site) -> None:
    before = site.engines
    site.helm("upgrade", RELEASE, CHART, "--set=operator.replicas=2", "--wait")
    site.ready()
    assert site.engines == before
    (lease,) = site.get("lease", namespace=SYSTEM)["items"]
    operators = site.get("pods", namespace=SYSTEM)["items"]
    assert len(operators) == 2
    assert all(_is_ready(pod) for pod in operators)
    assert lease["spec"]["holderIdentity"]


def test_leaves_nothing_but_the_crds(site: Site) -> None:
    site.kubectl("delete", "decodepools,prefillpools", "--all")
    ours = f"{labels.MANAGED_BY}=tandem-operator"
    until(
        lambda: {*_everything(site.node, ours)} <= {*_kept(site)},
        "the pools' children to be collected, but for addresses and keys",
    )
    site.helm("uninstall", RELEASE, "--wait")
    # As docs/run/kubernetes.md says.
    site.node.kubectl(
        *("delete", "services,secrets", "--all-namespaces"),
        f"--selector={labels.ENDPOINT},{ours}",
    )
    until(lambda: not _everything(site.node, ours), "the addresses and keys to be gone")
    until(
        lambda: not _everything(site.node, f"{labels.INSTANCE}={RELEASE}"), "the release to be gone"
    )
    objects = site.get("leases,secrets,roles,rolebindings,serviceaccounts", namespace=SYSTEM)[
        "items"
    ]
    assert [each["metadata"]["name"] for each in objects] == ["default"]
    remaining_crds = {
        crd["metadata"]["name"]
        for crd in json.loads(site.node.kubectl("get", "crd", "--output=json"))["items"]
    }
    assert remaining_crds == {"prefillpools.tandem.dev", "decodepools.tandem.dev"}


def _is_ready(pod: Any) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(
        condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions
    )


def _kept(site: Site) -> list[str]:
    """Addresses and keys of endpoints, and what Kubernetes makes of the addresses."""
    kinds = ("get", "services,secrets,endpoints,endpointslices", f"--selector={labels.ENDPOINT}")
    return site.kubectl(*kinds, "--output=name").split()


def _everything(node: Node, selector: str) -> list[str]:
    """Names of all objects with the label, of every kind, in all namespaces."""
    kinds = node.kubectl("api-resources", "--verbs=list", "--output=name").split()
    listed = ",".join(sorted(set(kinds) - {"componentstatuses"}))
    arguments = ("get", listed, "--all-namespaces", f"--selector={selector}", "--output=name")
    return node.kubectl(*arguments, "--ignore-not-found").split()
