"""`python -m images`, for `make images`: write the container images as OCI archives."""

import argparse
import sys
from pathlib import Path

from . import build, contents, hot_path


def main() -> int:
    """Exit status: 0, or 1 with one line on stderr when a layer cannot be built."""
    root = Path(__file__).parents[1]
    parser = argparse.ArgumentParser(prog="python -m images", description=__doc__)
    parser.add_argument("--out", type=Path, default=root / "dist/images", help="target folder")
    parser.add_argument(
        "--whole",
        action="store_true",
        help="keep torch's GPU libraries in tandem-engine (about 4 GB more)",
    )
    parser.add_argument(
        "--optimize",
        type=int,
        choices=range(4),
        default=hot_path.OPTIMIZE,
        help="level of the C compiler for the request paths (default: %(default)s); 0 is for tests",
    )
    arguments = parser.parse_args()
    checkout = build.Checkout(root, arguments.whole, arguments.optimize)
    try:
        build.build(checkout, arguments.out, _say)
    except contents.BuildFailed as failed:
        sys.stderr.write(f"images: {failed}\n")
        return 1
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
