"""Pods and helpers for the local runner's tests."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

SERVER = str(Path(__file__).with_name("server.py"))
POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


def container(
    name: str = "web", port: int = 8000, args: tuple[str, ...] = (), **fields: Any
) -> Any:
    """A container that runs `server.py` and is ready when it answers."""
    spec = {
        "name": name,
        "image": "python:3.11",
        "command": ["python", SERVER, "$(POD_IP)", str(port)],
        "args": list(args),
        "ports": [{"name": "http", "containerPort": port}],
        "readinessProbe": {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1},
        **fields,
    }
    spec["env"] = [POD_IP, {"name": "NAME", "value": name}, *fields.get("env", ())]
    return spec


def pod(name: str, *containers: Any, **spec: Any) -> dict[str, Any]:
    """A Pod with these containers, or with one default container."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}", "labels": {"a/b": "c"}},
        "spec": {"containers": list(containers or (container(),)), **spec},
    }


async def get(address: str, path: str, port: int = 8000) -> Any:
    """The JSON that a pod's server returns for `path`."""
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://{address}:{port}{path}") as answer,
    ):
        return json.loads(await answer.text())


async def until(condition: Callable[[], bool]) -> None:
    """Return once `condition()` holds; fail after 20 seconds."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


def group_is_gone(group: int) -> bool:
    """Whether no process of the group is left; zombies do not count, since they have ended."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, _, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except (OSError, ValueError):
                continue
            if int(pgrp) == group and state != "Z":
                return False
    return True


def alive(pid: int) -> bool:
    """Whether the process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
