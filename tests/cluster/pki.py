"""A certificate authority for one cluster, and kubeconfigs signed by it. Needs openssl."""

import base64
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

_DAYS = "3650"


class Authority:
    """Issues certificates below `folder`: `NAME.crt`, `NAME.key`; its own are `ca.*`, `sa.*`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", str(self.key("ca")), "-out", str(self.certificate("ca"))),
            *("-days", _DAYS, "-subj", "/CN=test-cluster"),
            # Strict verification (Python 3.13's default) requires this extension of a CA.
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature"),
        )
        # Tokens are signed with RSA, as most clusters do.
        _openssl("genrsa", "-out", str(self.key("sa")), "2048")
        _openssl("rsa", "-in", str(self.key("sa")), "-pubout", "-out", str(folder / "sa.pub"))

    def certificate(self, name: str) -> Path:
        return self._folder / f"{name}.crt"

    def key(self, name: str) -> Path:
        return self._folder / f"{name}.key"

    @property
    def service_account_public(self) -> Path:
        return self._folder / "sa.pub"

    def issue(
        self, name: str, user: str, *, groups: Sequence[str] = (), hosts: Sequence[str] = ()
    ) -> None:
        """Create certificate `name` for `user`, and for servers on `hosts` (`IP:…`, `DNS:…`)."""
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        lines = ["extendedKeyUsage=serverAuth,clientAuth", "authorityKeyIdentifier=keyid"]
        if hosts:
            lines.append(f"subjectAltName={','.join(hosts)}")
        extensions.write_text("\n".join(lines))
        subject = "".join(f"/O={group}" for group in groups) + f"/CN={user}"
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", str(self.key(name)), "-out", str(request), "-subj", subject),
        )
        _openssl(
            *("x509", "-req", "-in", str(request), "-extfile", str(extensions), "-days", _DAYS),
            *("-CA", str(self.certificate("ca")), "-CAkey", str(self.key("ca"))),
            *("-CAcreateserial", "-out", str(self.certificate(name))),
        )

    def kubeconfig(self, name: str, url: str, *, token: str | None = None) -> dict[str, object]:
        """A kubeconfig document for `url` with `name`'s client certificate, or with `token`."""
        user = {"token": token} if token is not None else {
            "client-certificate-data": _base64(self.certificate(name)),
            "client-key-data": _base64(self.key(name)),
        }  # fmt: skip
        cluster = {
            "server": url,
            "certificate-authority-data": _base64(self.certificate("ca")),
        }
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
            "current-context": "test",
        }


def write(path: Path, document: object) -> Path:
    """Write `document` as JSON (valid YAML) to `path`, mode 0600; returns `path`."""
    path.touch(mode=0o600)
    path.write_text(json.dumps(document, indent=1))
    return path


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
