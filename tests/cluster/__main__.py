"""`python -m tests.cluster tools|up|load|describe|down`: what `make cluster-…` calls."""

import argparse
import sys
from pathlib import Path

from . import tools
from .control_plane import DidNotStart
from .node import CannotStart, Node


def main() -> int:
    """0, 2 when this machine cannot, 1 when something did not start."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster")
    commands = parser.add_subparsers(dest="command", required=True)
    needed = commands.add_parser("tools", help="build what make test needs")
    needed.add_argument("--node", action="store_true", help="and what make e2e needs")
    up = commands.add_parser("up", help="start the node and print how to reach it")
    up.add_argument("--gpus", type=int, default=0, help="show so many nvidia.com/gpu on the node")
    commands.add_parser("down", help="stop the node and remove what it left")
    commands.add_parser("describe", help="print what the node's pods are at")
    load = commands.add_parser("load", help="import OCI archives into the node")
    load.add_argument("archive", type=Path, nargs="+")
    arguments = parser.parse_args()
    try:
        _run(arguments)
    except (tools.MissingTool, CannotStart) as cannot:
        print(f"cluster: {cannot}", file=sys.stderr)
        return 2
    except DidNotStart as failed:
        print(f"cluster: {failed}", file=sys.stderr)
        return 1
    return 0


def _run(arguments: argparse.Namespace) -> None:
    node = Node()
    match arguments.command:
        case "tools":
            tools.ensure((*tools.CONTROL_PLANE, "helm"), _say)
            if arguments.node:
                tools.ensure_packages(tools.NODE_PACKAGES, _say)
                tools.ensure(tools.NODE, _say)
        case "up":
            node.up(_say)
            if arguments.gpus:
                node.show_gpus(arguments.gpus)
            print(f"export KUBECONFIG={node.kubeconfig} PATH={tools.cache() / 'bin'}:$PATH")
        case "down":
            node.down()
        case "describe":
            print(node.describe())
        case "load":
            for archive in arguments.archive:
                node.load_image(archive)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
