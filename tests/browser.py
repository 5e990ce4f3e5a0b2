"""Headless Chromium, driven through the DevTools protocol, and fixtures of tests in it."""

import asyncio
import base64
import contextlib
import itertools
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-sync"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-port=0"),
)

LOW_CONTRAST = """
(() => {
  const channel = c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) =>
    0.2126 * channel(r / 255) + 0.7152 * channel(g / 255) + 0.0722 * channel(b / 255);
  function background(element) {
    for (let e = element; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.length < 4 || colour[3] > 0.99) return colour;
    }
    return [255, 255, 255];
  }
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const low = new Set();
  let checked = 0;
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || !element.checkVisibility() || element.tagName === "SCRIPT") continue;
    const style = getComputedStyle(element);
    const ink = element.closest("svg") ? style.fill : style.color;
    const pair = [luminance(parse(ink)), luminance(parse_background(element))];
    const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    checked += 1;
    if (ratio < 4.5) low.add(`${ratio.toFixed(1)} ${element.tagName} ${node.data.slice(0, 40)}`);
  }
  function parse_background(element) {
    return background(element.closest("svg")?.closest("figure") ?? element);
  }
  return { checked, low: [...low] };
})()
"""
"""Text whose contrast is below 4.5, and how many texts were looked at."""
FOCUSED = """
(() => {
  const e = document.activeElement;
  if (e === document.body) return null;
  window.seen = window.seen ?? new Set();
  window.seen.add(e);
  const style = getComputedStyle(e);
  return { count: window.seen.size, tag: e.tagName, text: e.textContent.trim().slice(0, 30),
           outline: style.outlineStyle, width: parseFloat(style.outlineWidth) };
})()
"""
"""The focused element and how many had the focus so far; null: none has it."""


class Tab:
    """A page that is open in the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []
        """Console messages, exceptions and log entries, like violations of the page's policy."""
        self.requested: list[str] = []
        """URLs that the page asked for, its own file included."""
        self._socket = socket
        self._numbers = itertools.count(1)
        self._session = self._context = ""
        self._loaded = asyncio.Event()
        self._downloaded = asyncio.Event()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def open(self, file: Path) -> None:
        """Open a file and wait for its load event."""
        self._loaded.clear()
        await self.call("Page.navigate", url=file.as_uri())
        await self._loaded.wait()

    async def download(self, script: str, folder: Path) -> Path:
        """Run a JavaScript expression that saves a file, and wait for it: the one in `folder`."""
        self._downloaded.clear()
        await self.call(
            "Browser.setDownloadBehavior",
            behavior="allow",
            browserContextId=self._context,
            downloadPath=str(folder),
            eventsEnabled=True,
        )
        await self.run(script)
        await self._downloaded.wait()
        (file,) = folder.iterdir()
        return file

    async def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        answer = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def resize(self, width: int, height: int = 800) -> None:
        """Show the page at this size, and wait until it has been painted twice."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        await self.painted()

    async def painted(self) -> None:
        """Wait for two frames: observers of sizes run before the second."""
        frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        await self.run(f"{frames}.then(() => 0)")

    async def prefer(self, **features: str) -> None:
        """Set media features, like `prefers_color_scheme="dark"`."""
        listed = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        await self.call("Emulation.setEmulatedMedia", features=listed)
        await self.painted()

    async def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key."""
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        typed = {"text": text} if text else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **pressed, **typed)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    async def screenshot(self, file: Path) -> None:
        """Write the whole page to a PNG file."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = await self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol; returns its result."""
        number = next(self._numbers)
        received = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        await self._socket.send_json(message)
        answer = await received
        assert "error" not in answer, (method, answer)
        result: dict[str, Any] = answer["result"]
        return result

    async def attach(self, context: str) -> None:
        """Create the tab in a browser context."""
        self._context = context
        target = await self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def receive(self) -> None:
        """Pass on what the browser sends, until the connection closes."""
        async for frame in self._socket:
            message = frame.json()
            if "id" in message:
                self._answers.pop(message["id"]).set_result(message)
            else:
                self._note(message["method"], message["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Page.loadEventFired":
                self._loaded.set()
            case "Browser.downloadProgress" if params["state"] == "completed":
                self._downloaded.set()
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown" | "Log.entryAdded":
                self.problems.append(str(params))
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])


@contextlib.contextmanager
def chromium_running(chromium: Path, profile: Path) -> Iterator[str]:
    """A browser that ends with the block, as the URL that `new_tab` takes; `profile` is an empty
    folder."""
    # Chromium writes the port and the path of its URL there once it listens.
    listening, log = profile / "DevToolsActivePort", profile.with_suffix(".log")
    with log.open("wb") as output:
        browser = subprocess.Popen(
            [str(chromium), *FLAGS, f"--user-data-dir={profile}"], stdout=output, stderr=output
        )
    try:
        while not listening.exists() or len(parts := listening.read_text().split()) < 2:
            assert browser.poll() is None, f"Chromium did not start: {log.read_text()}"
            time.sleep(0.02)
        yield f"ws://127.0.0.1:{parts[0]}{parts[1]}"
    finally:
        browser.terminate()
        browser.wait()


@contextlib.asynccontextmanager
async def new_tab(url: str) -> AsyncIterator[Tab]:
    """A tab that shares nothing but the browser with others; it ends with the block."""
    async with (
        aiohttp.ClientSession() as session,
        # A screenshot is one message.
        session.ws_connect(url, max_msg_size=0) as socket,
    ):
        tab = Tab(socket)
        receiving = asyncio.create_task(tab.receive())
        # It belongs to this connection, with which it ends.
        context = await tab.call("Target.createBrowserContext", disposeOnDetach=True)
        await tab.attach(context["browserContextId"])
        yield tab
        await socket.close()
        await receiving


@pytest.fixture(scope="module")
def browser(chromium_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A browser, as the URL that `new_tab` takes."""
    with chromium_running(chromium_program, tmp_path_factory.mktemp("browser") / "profile") as url:
        yield url


@pytest_asyncio.fixture
async def tab(browser: str) -> AsyncIterator[Tab]:
    """A fresh tab that must not complain about anything, nor ask any network."""
    async with new_tab(browser) as tab:
        yield tab
        assert tab.problems == []
        assert [
            url for url in tab.requested if not url.startswith(("file:", "data:", "blob:"))
        ] == []
