"""helm test: the operator answers, and the cluster serves both kinds with /scale and /status."""

# ruff: noqa: S310, T201 - both addresses are this chart's; the pod's log is where this is read

import json
import ssl
import sys
import urllib.request
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API = "https://kubernetes.default.svc/apis/tandem.dev/v1alpha1"
WANTED = {
    f"{kind}{part}"
    for kind in ("prefillpools", "decodepools")
    for part in ("", "/scale", "/status")
}

with urllib.request.urlopen(sys.argv[1], timeout=10) as answer:
    print(f"{sys.argv[1]}: {answer.status}")

request = urllib.request.Request(
    API, headers={"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"}
)
trusted = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
with urllib.request.urlopen(request, timeout=10, context=trusted) as answer:
    served = {resource["name"] for resource in json.load(answer)["resources"]}
if missing := WANTED - served:
    sys.exit(
        f"the CRDs do not serve {', '.join(sorted(missing))}: kubectl apply --server-side -f crds/"
    )
print(f"{API}: {', '.join(sorted(WANTED))}")
