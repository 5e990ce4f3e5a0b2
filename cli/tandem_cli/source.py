"""Where trace and doctor look: the stack of this machine, or a namespace of a cluster."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from tandem_contract.commandline import fail
from tandem_kube.errors import ApiError, NotConfigured
from tandem_local.errors import NoStack
from tandem_local.state import State, default_run_dir, read_state

from .options import run_dir_option

F = TypeVar("F", bound=Callable[..., Any])


def source_options(function: F) -> F:
    """`-n`, `--kubeconfig`, `--context` and `--run-dir`: the fields of `Source`."""
    for option in (
        run_dir_option,
        click.option("--context", help="Context of the kubeconfig.  [default: the current one]"),
        click.option(
            "--kubeconfig",
            type=click.Path(path_type=Path, dir_okay=False),
            help="Kubeconfig file.  [default: $KUBECONFIG or ~/.kube/config; in a pod, its own "
            "cluster]",
        ),
        click.option(
            "-n", "--namespace", help="Of a cluster.  [default: the kubeconfig context's]"
        ),
    ):
        function = option(function)
    return function


@dataclass(frozen=True)
class Source:
    """What the command line says."""

    namespace: str | None
    kubeconfig: Path | None
    context: str | None
    run_dir: Path | None

    def __post_init__(self) -> None:
        if self.run_dir and self._cluster_meant:
            raise click.UsageError("--run-dir is for this machine's stack, the rest for a cluster")

    def stack(self) -> State | None:
        """The stack that is meant; None: a cluster is. Raises NoStack."""
        if self._cluster_meant:
            return None
        try:
            return read_state(self.run_dir or default_run_dir())
        except NoStack:
            if self.run_dir is not None:
                raise
            return None

    @contextmanager
    def explained(self) -> Iterator[None]:
        """End the program with one line when there is nothing to look at, or nobody answers."""
        try:
            yield
        except NotConfigured as err:
            no_stack = "" if self._cluster_meant else f"no stack runs in {default_run_dir()}, and "
            fail(f"{no_stack}{err}")
        except (NoStack, ApiError) as err:
            fail(str(err))

    @property
    def _cluster_meant(self) -> bool:
        return bool(self.namespace or self.kubeconfig or self.context)
