"""The target of trace and doctor: the stack of this machine, or a namespace of a cluster."""

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

from .options import STACK_AND_CLUSTER, context_option, kubeconfig_option, run_dir_option

F = TypeVar("F", bound=Callable[..., Any])


def target_options(function: F) -> F:
    """`-n`, `--kubeconfig`, `--context` and `--run-dir`: the fields of `Target`."""
    namespace_option = click.option(
        "-n",
        "--namespace",
        help="Namespace of a cluster.  [default: the kubeconfig context's]",
    )
    # Decorators apply from the last to the first: --help lists -n first.
    for option in (run_dir_option, context_option, kubeconfig_option, namespace_option):
        function = option(function)
    return function


def no_target_message(run_dir: Path, err: NotConfigured) -> str:
    """The error if no option names a target, no stack runs here, and no cluster is configured."""
    return f"no stack runs in {run_dir} (start one with tandem up or tandem demo), and {err}"


@dataclass(frozen=True)
class Target:
    """The stack or cluster that the command line names."""

    namespace: str | None
    kubeconfig: Path | None
    context: str | None
    run_dir: Path | None

    def __post_init__(self) -> None:
        if self.run_dir and self._names_cluster:
            raise click.UsageError(STACK_AND_CLUSTER)

    def stack(self) -> State | None:
        """The local stack; None if the target is a cluster. Raises NoStack."""
        if self._names_cluster:
            return None
        try:
            return read_state(self.run_dir or default_run_dir())
        except NoStack:
            # Without any option a missing stack means: use the cluster of the kubeconfig.
            if self.run_dir is not None:
                raise
            return None

    @contextmanager
    def exit_on_error(self) -> Iterator[None]:
        """End the program with one line if there is no target, or it does not answer."""
        try:
            yield
        except NotConfigured as err:
            # Without any option the user may have meant a local stack: the message names both.
            fail(str(err) if self._names_cluster else no_target_message(default_run_dir(), err))
        except (NoStack, ApiError) as err:
            fail(str(err))

    @property
    def _names_cluster(self) -> bool:
        return bool(self.namespace or self.kubeconfig or self.context)
