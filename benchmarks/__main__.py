"""Run every benchmark of this folder, one after the other, and print one table."""

import subprocess
import sys
import tempfile
from pathlib import Path

import click

from .figures import Figure, load, report

HERE = Path(__file__).parent
SUPPORT = {
    "__init__",
    "__main__",
    "fake_engine",
    "figures",
    "h2load",
    "peers",
    "proxies",
    "rawcopy",
}


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write all figures here")
def main(file: Path | None) -> None:
    """Run every benchmark and print one table; exit 1 when one cannot run."""
    figures: list[Figure] = []
    failed = []
    for name in sorted(p.stem for p in HERE.glob("*.py") if p.stem not in SUPPORT):
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "figures.json"
            command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(out)]
            if subprocess.run(command, check=False).returncode:
                failed.append(name)
            else:
                figures += load(out)
    report(figures, file)
    if failed:
        raise click.ClickException(f"could not run: {', '.join(failed)}")


if __name__ == "__main__":
    main()
