"""The figures of all pods of a fleet in one table, of which a decision writes only what changed.

A placement changes one or two pods, an answer and a scrape one: their estimates note it here, and
the next decision writes these rows again. So no decision walks over all pods. What needs such a
walk, figures shared between alike pods, is done beside the scrapes (`share`).
"""

from collections.abc import Iterable
from functools import partial
from math import inf

from tandem_contract.paths import Role
from tandem_planner.cost import FAILURE_SECONDS, PodFigures
from tandem_planner.figure_table import FigureTable

from ..estimates.answer_lengths import LengthClasses
from ..estimates.contention import Contention
from ..estimates.kinds import fill_in
from ..estimates.pod_estimates import OUTPUT_PRIOR
from .pods import Pod


class FleetFigures:
    """One row per pod, ready or not, in the order of the fleet."""

    def __init__(self) -> None:
        self.output_tokens = OUTPUT_PRIOR
        """Tokens of an answer, on average over the pods."""
        self.contention = Contention()
        """With other replicas, for the same pods."""
        self._lengths: dict[tuple[str, ...], LengthClasses] = {}
        """Models of a pod → the lengths of their answers."""
        self.set_pods(())

    def set_pods(self, pods: Iterable[Pod]) -> None:
        """Pods came or went: number the rows again."""
        self.pods = tuple(pods)
        """The pod of each row."""
        self.names = tuple(pod.name for pod in self.pods)
        self.rows = {pod: row for row, pod in enumerate(self.pods)}
        self._table = FigureTable([PodFigures()] * len(self.pods))
        self._changed = set(range(len(self.pods)))
        """Rows to write before the next decision."""
        self._expiring: dict[int, float] = {}
        """Row → when its figures change although nothing happens; only rows of which that is
        known."""
        self._next_expiry = inf
        """The earliest of these times, or earlier."""
        # By name, since replicas discover pods in different orders. Where prompts are not computed,
        # requests that meet do not wait for each other.
        computing = [pod for pod in self.pods if pod.backend.role.serves(Role.PREFILL)]
        computing.sort(key=lambda pod: pod.name)
        self._turns = {self.rows[pod]: turn for turn, pod in enumerate(computing)}
        """Row of a pod that computes prompts → its number among them."""
        models = {tuple(pod.backend.models) for pod in self.pods}
        self._lengths = {key: self._lengths.get(key) or LengthClasses() for key in models}
        for pod, row in self.rows.items():
            pod.estimates.running.lengths = self._lengths[tuple(pod.backend.models)]
            pod.estimates.on_change = partial(self._changed.add, row)

    def at(self, now: float) -> FigureTable:
        """The figures as of `now`, Unix seconds; valid until the next call."""
        if self._next_expiry <= now:
            self._changed.update(row for row, at in self._expiring.items() if at <= now)
            self._next_expiry = min((at for at in self._expiring.values() if at > now), default=inf)
        for row in self._changed:
            self._write(row, now)
        self._changed.clear()
        return self._table

    def share(self) -> None:
        """Give pods without samples the figures of alike pods, and average the answers' lengths.
        Walks over all pods: to be called now and then, beside scrapes."""
        # First whatever the role, then overruled by pods of the same role where some are known:
        # a decode pod that never computed a prompt is no faster than the prefill pods.
        for is_role_equal in (False, True):
            alike = (
                (
                    (
                        pod.backend.role if is_role_equal else None,
                        pod.backend.models,
                        pod.backend.compat,
                    ),
                    pod.estimates,
                )
                for pod in self.pods
            )
            # A pod of another role may be another machine: it does not replace what was measured.
            fill_in(alike, is_same_role=is_role_equal)
        # A prefill leg is no answer.
        answering = [pod for pod in self.pods if pod.backend.role.serves(Role.DECODE)]
        outputs = [o for pod in answering if (o := pod.estimates.answers.average) is not None]
        if outputs:
            self.output_tokens = sum(outputs) / len(outputs)

    def _write(self, row: int, now: float) -> None:
        pod = self.pods[row]
        figures = pod.estimates.figures(now)
        if rate := pod.health.failure_rate:
            figures = figures._replace(standing=figures.standing + FAILURE_SECONDS * rate)
        if self.contention.replicas > 1 and (turn := self._turns.get(row)) is not None:
            seconds = self.contention.seconds(turn, pod.estimates.mean_prefill)
            figures = figures._replace(standing=figures.standing + seconds)
        # As `congestion`, only where no other pods are there to prefill.
        if pod.estimates.is_unified and (harm := pod.prefixes.eviction_harm(pod)):
            figures = figures._replace(eviction=harm)
        self._table.write(row, figures)
        if (expires := pod.estimates.expires) == inf:
            self._expiring.pop(row, None)
        else:
            self._expiring[row] = expires
            self._next_expiry = min(self._next_expiry, expires)
