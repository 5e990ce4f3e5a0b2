"""A Hugging Face hub on this machine, as far as `huggingface_hub` asks it for one repository."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "org/model"


class FakeHub:
    """The hub's API for the revision v1 of one repository; counts requests."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.files = files or {"config.json": b"{}"}
        self.requests: Counter[str] = Counter()
        self.downloads: Counter[str] = Counter()
        self.url = ""
        self.token: str | None = None
        """What requests must have; None: nothing."""
        self.refusal: tuple[int, str] | None = None
        """Status and error code of every answer."""

    async def revision(self, request: web.Request) -> web.Response:
        self.requests["revision"] += 1
        if refusal := self._refusal(request):
            return refusal
        if request.match_info["revision"] not in ("v1", COMMIT):
            return _error(404, "RevisionNotFound")
        files = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
        return web.json_response({"id": REPOSITORY, "sha": COMMIT, "siblings": files})

    async def tree(self, _request: web.Request) -> web.Response:
        return web.json_response(
            [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(name)}
                for name, data in self.files.items()
            ]
        )

    async def file(self, request: web.Request) -> web.Response:
        self.requests[request.method] += 1
        if refusal := self._refusal(request):
            return refusal
        name = request.match_info["name"]
        if request.method == "GET":
            self.downloads[name] += 1
        headers = {"ETag": f'"{_etag(name)}"', "X-Repo-Commit": COMMIT}
        return web.Response(body=self.files[name], headers=headers)

    def _refusal(self, request: web.Request) -> web.Response | None:
        if self.refusal is not None:
            return _error(*self.refusal)
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return _error(401, "GatedRepo")
        return None


@asynccontextmanager
async def serving(hub: FakeHub, host: str = "127.0.0.1") -> AsyncIterator[FakeHub]:
    """Serve on a free port of `host` until the block ends; `hub.url` is its address."""
    app = web.Application()
    app.router.add_get(f"/api/models/{REPOSITORY}/revision/{{revision}}", hub.revision)
    app.router.add_get(f"/api/models/{REPOSITORY}/tree/{COMMIT}", hub.tree)
    app.router.add_get(f"/{REPOSITORY}/resolve/{COMMIT}/{{name:.*}}", hub.file)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, host, 0).start()
    hub.url = "http://{}:{}".format(*runner.addresses[0])
    try:
        yield hub
    finally:
        await runner.cleanup()


def _etag(name: str) -> str:
    return name.replace("/", "-")


def _error(status: int, code: str) -> web.Response:
    return web.Response(status=status, headers={"X-Error-Code": code, "X-Error-Message": code})
