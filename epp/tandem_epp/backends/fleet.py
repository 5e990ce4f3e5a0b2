"""All backends, and who of them may do what for a request."""

from collections.abc import Iterable, Iterator
from typing import Final

from tandem_contract.paths import Role

from .pods import BLOCK_TOKENS, CAPACITY_BLOCKS, Member, Pod, may_hand_over, share_kv

REMEMBERED: Final = 600.0
"""Seconds for which a model whose last pod went is still one that will be back: a rollout that
stops all before it starts any, a scale to nothing. Then it is unknown."""
_UNLISTED: Final = "\0"
"""Key of the view for models no backend lists; no model is called so."""


class Fleet:
    """All backends, and views of them that stay the same object until something changes.

    Scorers keep what they computed for a view, so `changed` is called after every change that a
    scorer could see, and only then.
    """

    def __init__(self) -> None:
        self._pods: dict[str, tuple[str, Pod]] = {}
        self._models: frozenset[str] = frozenset()
        self._gone: dict[str, float] = {}
        """Models that backends listed until lately → when they were last seen, Unix seconds."""
        self.mixed = False
        """Whether backends list different models, so that a request's model says where to."""
        self._views: dict[object, tuple[Pod, ...]] = {}

    def __iter__(self) -> Iterator[Pod]:
        return (pod for _, pod in self._pods.values())

    def __len__(self) -> int:
        return len(self._pods)

    def apply(
        self,
        members: Iterable[Member],
        block_tokens: int = BLOCK_TOKENS,
        capacity: int = CAPACITY_BLOCKS,
        now: float = 0.0,
    ) -> None:
        """Have exactly these; one whose name, uid and URL stay keeps what is known of it.

        `block_tokens` and `capacity` are the index's for a backend that does not tell its own;
        `now` is Unix seconds.
        """
        pods = {}
        for member in members:
            backend = member.backend
            uid, pod = self._pods.get(backend.name, ("", None))
            if pod is None or (uid, pod.backend.url) != (member.uid, backend.url):
                pod = Pod(backend, block_tokens, capacity)
            pod.backend, pod.serving = backend, member.serving
            pods[backend.name] = (member.uid, pod)
        self._pods = pods
        models = frozenset(model for pod in self for model in pod.backend.models)
        kept = {name: at for name, at in self._gone.items() if now - at < REMEMBERED}
        self._gone = {**kept, **dict.fromkeys(self._models - models, now)}
        self._models = models
        self.mixed = len({pod.backend.models for pod in self}) > 1
        self.changed()

    def changed(self) -> None:
        """Forget the views: gauges, health or addresses moved."""
        self._views.clear()

    def suspect(self, pod: Pod) -> None:
        """A request failed at `pod`: prefer others until it is scraped again."""
        if not pod.suspect:
            pod.suspect = True
            self.changed()

    @property
    def models(self) -> tuple[str, ...]:
        """The model names that backends list, sorted."""
        return tuple(sorted(self._models))

    def serves(self, model: str) -> bool:
        """Whether some backend, healthy or not, may serve `model`; true when there is none."""
        return model in self._models or not all(pod.backend.models for pod in self) or not self

    def served(self, model: str, now: float) -> bool:
        """Whether a backend listed `model` until lately; no more does, by now (Unix seconds)."""
        return now - self._gone.get(model, -REMEMBERED) < REMEMBERED

    def ready(self, model: str | None) -> tuple[Pod, ...]:
        """Backends that may be chosen for `model`; one without a list of models serves any."""
        key = self._key(model)
        if (view := self._views.get(key)) is None:
            view = tuple(
                pod
                for pod in self
                if pod.ready
                and (key is None or not pod.backend.models or key in pod.backend.models)
            )
            view = self._views[key] = _preferred(view)
        return view

    def partners(self, model: str | None, decode: Pod) -> tuple[Pod, ...]:
        """Whom to choose from to prefill for `decode`: `eligible` pods, without those that are
        cold to it unless all are."""
        eligible = self.eligible(model, decode)
        if not decode.cold:
            return eligible
        key = ("warm", self._key(model), decode.name)
        if (view := self._views.get(key)) is None:
            view = tuple(pod for pod in eligible if pod not in decode.cold)
            if not any(may_hand_over(pod, decode) for pod in view):
                view = eligible
            self._views[key] = view
        return view

    def eligible(self, model: str | None, decode: Pod) -> tuple[Pod, ...]:
        """Those of `ready(model)` that may prefill for `decode`, perhaps among others that their
        role rules out; `ready(model)` itself where it has no more than one KV compat hash."""
        ready = self.ready(model)
        if decode.backend.role is not Role.DECODE:
            return tuple(pod for pod in ready if may_hand_over(pod, decode))
        key = (self._key(model), decode.backend.compat, decode.backend.models)
        if (view := self._views.get(key)) is None:
            view = tuple(pod for pod in ready if share_kv(pod, decode))
            view = self._views[key] = ready if len(view) == len(ready) else view
        return view

    def paired(self, model: str | None) -> tuple[Pod, ...]:
        """Those of `ready(model)` for whom another of them may prefill."""
        key = ("paired", self._key(model))
        if (view := self._views.get(key)) is None:
            ready = self.ready(model)
            view = self._views[key] = tuple(
                pod for pod in ready if any(may_hand_over(other, pod) for other in ready)
            )
        return view

    def _key(self, model: str | None) -> str | None:
        # Names that no backend lists share one view, so clients cannot grow the table.
        return model if model is None or model in self._models else _UNLISTED


def _preferred(pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
    """Without those under suspicion, unless nobody else decodes."""
    others = tuple(pod for pod in pods if not pod.suspect)
    return others if any(pod.backend.role.serves(Role.DECODE) for pod in others) else pods
