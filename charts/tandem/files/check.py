"""helm test: the operator answers, the cluster serves both kinds, and DecodePools answer.

check.py READINESS_URL [NAMESPACE …]    the namespaces of the pools; without any: all
"""

# ruff: noqa: S310, T201 - all addresses are the cluster's; the pod's log is where this is read

import http.client
import json
import ssl
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API = "https://kubernetes.default.svc/apis/tandem.dev/v1alpha1"
KINDS = {
    f"{kind}{part}"
    for kind in ("prefillpools", "decodepools")
    for part in ("", "/scale", "/status")
}
MOST_POOLS, MOST_MODELS = 16, 16
"""DecodePools that get requests, and models of each that are asked for: helm waits five minutes."""
ATTEMPTS, PAUSE = 3, 5.0
"""Requests before a DecodePool counts as broken, and the seconds between them: a pod may be ready a
moment before its address is known to the gateway."""
# The pod may have a proxy, which is for addresses outside the cluster.
urllib.request.install_opener(urllib.request.build_opener(urllib.request.ProxyHandler({})))


def ask_api(path: str) -> dict:
    """The API server's answer to the operator's ServiceAccount, which this pod has."""
    token = {"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"}
    trusted = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    request = urllib.request.Request(f"{API}{path}", headers=token)
    with urllib.request.urlopen(request, timeout=10, context=trusted) as answer:
        return json.load(answer)


def served_kinds() -> set[str]:
    """The custom resources that the API server has; none without the CRDs."""
    try:
        return {resource["name"] for resource in ask_api("")["resources"]}
    except urllib.error.HTTPError as err:
        if err.code != http.client.NOT_FOUND:
            raise
        return set()


def decode_pools(namespaces: list[str]) -> list[dict]:
    """At most MOST_POOLS DecodePools."""
    paths = [f"/namespaces/{namespace}/decodepools" for namespace in namespaces]
    lists = [ask_api(f"{path}?limit={MOST_POOLS}") for path in paths or ["/decodepools"]]
    return [pool for answer in lists for pool in answer["items"]][:MOST_POOLS]


def why_not_asked(pool: dict) -> str | None:
    """Why a DecodePool gets no request; None: it must answer one."""
    status = pool.get("status", {})
    ready = next((c for c in status.get("conditions", []) if c["type"] == "Ready"), {})
    if ready.get("status") != "True":
        return f"not ready: {ready.get('message') or 'the operator has not reported on it yet'}"
    if not status.get("readyReplicas"):
        return "scaled to zero"
    return None if status.get("endpoint") else "another router than Tandem's serves it"


def send_requests(endpoint: str) -> str:
    """Have each model generate one token through the gateway. Returns the result in words; OSError,
    ValueError, LookupError, TypeError or HTTPException: the endpoint is no inference API."""
    with urllib.request.urlopen(f"{endpoint}/v1/models", timeout=30) as answer:
        models = [model["id"] for model in json.load(answer)["data"]]
    if not models:
        raise LookupError("it lists no models")
    # DecodePools that share an endpoint list the models of all of them.
    return "; ".join(send_request(endpoint, model) for model in models[:MOST_MODELS])


def send_request(endpoint: str, model: str) -> str:
    """Have one token generated; returns and raises as `send_requests`."""
    body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"{endpoint}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        tokens = json.load(answer)["usage"]["completion_tokens"]
        path = answer.headers["x-continuum-routing-path"]
    return f"{model} generated {tokens} token, routing path {path}"


def answers(pool: dict) -> bool:
    """Send a request to a DecodePool and print the result. False: it should answer and did not."""
    namespace, name = pool["metadata"]["namespace"], pool["metadata"]["name"]
    reason = why_not_asked(pool)
    if reason is not None:
        print(f"DecodePool {namespace}/{name}: no request sent, {reason}")
        return True
    endpoint = pool["status"]["endpoint"]
    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE if attempt else 0)
        is_answer, result = try_request(endpoint)
        print(f"DecodePool {namespace}/{name}: {endpoint}: {result}")
        if is_answer:
            return True
    print(f"  fix: kubectl -n {namespace} describe decodepool {name}")
    return False


def try_request(endpoint: str) -> tuple[bool, str]:
    """Whether the endpoint answers, and the result in words."""
    try:
        try:
            return True, send_requests(endpoint)
        except urllib.error.HTTPError as err:
            # The gateway answers, and wants a client's API key.
            if err.code == 401:
                return True, "answers, and wants an API key"
            return False, f"{err.code}: {err.read(500).decode(errors='replace')}"
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as err:
        return False, f"no answer of an inference API: {err!r}"


def main(readiness: str, namespaces: list[str]) -> int:
    """Exit status: 0, or 1 after a line that says what does not work."""
    try:
        with urllib.request.urlopen(readiness, timeout=10) as answer:
            print(f"{readiness}: {answer.status}")
    except (OSError, http.client.HTTPException) as err:
        print(f"the operator did not answer at {readiness} that it is ready: {err}")
        return 1
    try:
        return check_pools(namespaces)
    except (OSError, ValueError, http.client.HTTPException) as err:
        print(f"the API server did not answer at {API} as expected: {err}")
        return 1


def check_pools(namespaces: list[str]) -> int:
    """The exit status, as `main`. Raises what `ask_api` raises."""
    served = served_kinds()
    if missing := ", ".join(sorted(KINDS - served)):
        print(f"the CRDs do not serve {missing}: kubectl apply --server-side -f crds/")
        return 1
    print(f"{API}: {', '.join(sorted(KINDS))}")
    pools = decode_pools(namespaces)
    if not pools:
        print("no DecodePool to send a request to: kubectl apply -f examples/quickstart.yaml")
    # At once: each may take minutes to fail, and helm waits for five.
    with ThreadPoolExecutor(MOST_POOLS) as threads:
        answered = list(threads.map(answers, pools))
    names = [
        f"{pool['metadata']['namespace']}/{pool['metadata']['name']}"
        for pool, is_answered in zip(pools, answered, strict=True)
        if not is_answered
    ]
    if names:
        print(f"no answer from DecodePool {', '.join(names)}")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
