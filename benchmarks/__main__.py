"""Run the benchmarks of this folder, one after the other, and print one table."""

import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import click

from . import programs
from .figures import Figure, load, report

HERE = Path(__file__).parent
SUPPORT = {
    "__init__",
    "__main__",
    "aiohttp_proxy",
    "blocking_client",
    "counting",
    "epp_chunks",
    "epp_stacks",
    "epp_transport",
    "fake_engine",
    "figures",
    "floods",
    "flow_engines",
    "flow_live",
    "flow_stack",
    "flow_torch",
    "gpu_model",
    "gpu_transfer",
    "h2load",
    "live_stack",
    "live_summary",
    "load_reports",
    "load_run",
    "load_server",
    "load_tools",
    "load_truth",
    "paced_engine",
    "peers",
    "plan_published",
    "planning_router",
    "process_tree",
    "programs",
    "proxies",
    "proxy_load",
    "relay",
    "router_stacks",
    "routing_grants",
    "routing_llmd",
    "routing_load",
    "routing_rivals",
    "routing_slo",
    "storage_engines",
    "storage_trace",
}
"""Modules that are no benchmark of their own."""
OPT_IN = {
    "by_turns",
    "gpu",
    "loadtest",
    "routing_live",
    "routing_rows",
    "storage_roles",
    "storage_vllm",
}
"""Benchmarks that need a second checkout, a GPU, gigabytes of other programs, a trace, or
hours: `python -m benchmarks.NAME` runs them."""


class MissingPrograms(click.ClickException):
    """Programs that a benchmark starts are not installed: nothing was measured."""

    exit_code = 2


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write all figures here")
def main(file: Path | None) -> None:
    """Run every benchmark that needs no gigabytes of other programs and no trace; print one table.

    Exit status: 2 when a program is missing (nothing is measured then), 1 when a benchmark fails.
    """
    names = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in SUPPORT | OPT_IN)
    check_programs(names)
    figures: list[Figure] = []
    failed = []
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "figures.json"
            command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(out)]
            if subprocess.run(command, check=False).returncode:
                failed.append(name)
            else:
                figures += load(out)
    report(figures, file)
    if failed:
        raise click.ClickException(f"these benchmarks failed: {', '.join(failed)}")


def check_programs(names: list[str]) -> None:
    """Raise MissingPrograms when a benchmark needs a program that is not installed."""
    if lines := programs.missing_for([import_module(f"benchmarks.{name}") for name in names]):
        raise MissingPrograms(
            "programs are missing, so nothing was measured:\n  "
            + "\n  ".join(lines)
            + "\ninstall them, or run the other benchmarks one by one: python -m benchmarks.NAME"
        )


if __name__ == "__main__":
    main()
