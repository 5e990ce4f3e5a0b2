"""`python -m tests.cluster tools|up|load|describe|down`, for `make cluster-…` and `make e2e`."""

import argparse
import sys
import time
from pathlib import Path

from . import tools
from .control_plane import DidNotStart
from .node import CannotStart, Node


def main() -> int:
    """Exit status: 0, 1 if a process did not start, 2 if this machine lacks something."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster")
    commands = parser.add_subparsers(dest="command", required=True)
    needed = commands.add_parser("tools", help="build or install the programs that tests need")
    needed.add_argument("program", nargs="*", type=_program, help="default: what make test needs")
    needed.add_argument("--node", action="store_true", help="also what make e2e needs")
    up = commands.add_parser("up", help="start the node and print its KUBECONFIG line")
    up.add_argument(
        "--gpus",
        type=int,
        default=0,
        help="number of nvidia.com/gpu that the node reports; none exist",
    )
    commands.add_parser("down", help="stop the node; remove its namespaces, mounts and interfaces")
    commands.add_parser("describe", help="print the state and events of the node's pods")
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
            tools.ensure(arguments.program or tools.MAKE_TEST, _say)
            if arguments.node:
                tools.ensure_packages(tools.NODE_PACKAGES, _say)
                tools.ensure((*tools.NODE, *tools.NODE_GATEWAYS, *tools.NODE_POLICIES), _say)
        case "up":
            node.up(_say)
            if arguments.gpus:
                node.show_gpus(arguments.gpus)
            if warning := tools.kubectl_warning():
                _say(warning)
            _print_environment(node)
        case "down":
            node.down()
        case "describe":
            print(node.describe())
        case "load":
            for archive in arguments.archive:
                _say(f"importing {archive.name}")
                node.load_image(archive)
            # Again: of `make cluster-up cluster-load` this is the last line.
            _print_environment(node)


def _program(name: str) -> str:
    if name not in tools.ALL:
        raise argparse.ArgumentTypeError(f"{name}: not one of {', '.join(tools.ALL)}")
    return name


def _print_environment(node: Node) -> None:
    print(f"export KUBECONFIG={node.kubeconfig} PATH={tools.cache() / 'bin'}:$PATH")


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
