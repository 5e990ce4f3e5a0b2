"""All backends, and cached views of those that may decode or prefill for a request."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from tandem_contract.paths import Role
from tandem_planner.objective import NO_OBJECTIVE, Objective

from ..estimates.overheads import FirstTokenOverheads
from ..prefix.prefix_tree import PrefixTree
from .adapters import AdapterSlots
from .ejections import Ejections, available
from .fleet_figures import FleetFigures
from .members import Kind, Members, doubt_readiness, pods_by_name
from .pairing import (
    are_alike_unified,
    can_hand_off,
    can_prefill_for,
    domains_of_nodes,
    is_kv_compatible,
    pairing_key,
    place_of,
)
from .pods import BLOCK_TOKENS, CAPACITY_BLOCKS, DiscoveredBackend, Pod
from .stores import Stores
from .token_scales import TokenScales

REMOVED_MODEL_SECONDS: Final = 600.0
"""Seconds for which a model whose last pod was removed is expected back, after a rollout that stops
every pod before it starts any, or a scale to zero. Requests for it get 503; afterwards 404."""
MAX_ADAPTERS: Final = 4096
"""LoRA adapters that are remembered; beyond it, those that no engine reported for longest are
forgotten. Too low: requests for a rare adapter are placed as if it were resident everywhere."""
UNLISTED: Final = "\0"
"""View key of all models that no backend lists. No model has this name."""


class Fleet:
    """All backends, and views of them that stay the same object until something changes.

    What depends on the pods alone is computed when they change, not per request: `apply` drops all
    of it, `invalidate_views` what depends on readiness, and `invalidate_scores` only gives the
    views a new identity, because profiles cache scores per view object. So `invalidate_scores`
    must be called after every change that a scorer can see, and should be called after no other.
    """

    def __init__(self) -> None:
        self.prefixes: PrefixTree[Pod] = PrefixTree()
        """Which prompts each pod probably caches."""
        self.figures = FleetFigures()
        """What requests are predicted to take on each pod."""
        self.token_scales = TokenScales()
        """How many tokens texts have, per model."""
        self.objectives: Mapping[str, Objective] = {}
        """What requests are to meet, by the model or adapter that they ask for."""
        self.overheads = FirstTokenOverheads()
        """What first tokens take beyond the terms of the cost, per path."""
        self._backends: dict[str, Members] = {}
        """By backend name."""
        self._doubted: frozenset[Kind] = frozenset()
        """Kinds of pods of which all are unready."""
        self._pods: dict[str, Pod] = {}
        """The pods of all backends, by name."""
        self._models: frozenset[str] = frozenset()
        self._removed_models: dict[str, float] = {}
        self.expected_models: frozenset[str] = frozenset()
        """Models that are served as soon as pods for them come, such as after a scale to zero.
        Views are to be invalidated with it."""
        """Models that no backend lists any more → when one last did, Unix seconds."""
        self._adapters: dict[str, None] = {}
        """LoRA adapters that some engine reported, the latest last: models whose requests need a
        slot."""
        self.has_mixed_models = False
        """Whether backends list different models, so that a request's model restricts the pods."""
        self._serves_any_model = False
        """Whether some backend lists no models, and so may serve any."""
        # In all three: model, or a tuple that says what else the value depends on → value. Filled
        # on demand.
        self._views: dict[object, tuple[Pod, ...]] = {}
        self._members: dict[object, tuple[Pod, ...]] = {}
        """The pods of each view. Kept when only scores change: then the view is a copy of it."""
        self._facts: dict[object, bool] = {}
        """What depends on which backends there are, ready or not."""
        self.members_version = 0
        """Changes with the members of any view: with the backends, their health and their pairs."""
        self.stores = Stores()
        """The external stores of the pods."""
        self.ejections = Ejections(self, self.invalidate_views, self.invalidate_scores)

    def __iter__(self) -> Iterator[Pod]:
        return iter(self._pods.values())

    def __len__(self) -> int:
        return len(self._pods)

    def find(self, name: str) -> Pod | None:
        """The pod of this name."""
        return self._pods.get(name)

    def apply(
        self,
        backends: Iterable[DiscoveredBackend],
        block_tokens: int = BLOCK_TOKENS,
        capacity: int = CAPACITY_BLOCKS,
        now: float = 0.0,
    ) -> None:
        """Replace the backends. The pods of one whose name, uid and URL are unchanged keep their
        state.

        `block_tokens` and `capacity` are the KV block size and the blocks of a backend whose
        metrics do not report them; `now` is Unix seconds.
        """
        new: dict[str, Members] = {}
        for discovered in backends:
            name = discovered.backend.name
            members = self._backends.get(name)
            if members is None or not members.is_same(discovered):
                members = Members(discovered, block_tokens, capacity, self.prefixes)
            members.update(discovered)
            new[name] = members
        self._doubted = doubt_readiness(new.values(), self._doubted)
        # Placements hold the Pods that were dropped here and still return their counts to them.
        self._backends = new
        self._update_pods()
        # Pods that are not ready count too: a model is removed only with its last pod.
        models = frozenset(model for pod in self for model in pod.backend.models)
        recent = {
            name: removed
            for name, removed in self._removed_models.items()
            if now - removed < REMOVED_MODEL_SECONDS
        }
        self._removed_models = {**recent, **dict.fromkeys(self._models - models, now)}
        self._models = models
        self.has_mixed_models = len({pod.backend.models for pod in self}) > 1
        self._serves_any_model = not all(pod.backend.models for pod in self)
        self._facts.clear()
        self.invalidate_views()

    def objective(self, model: str | None) -> Objective:
        """What requests for `model` are to meet."""
        return NO_OBJECTIVE if model is None else self.objectives.get(model, NO_OBJECTIVE)

    @property
    def backends(self) -> Iterable[Members]:
        """The backends, each with its pods."""
        return self._backends.values()

    def set_ranks(self, members: Members, count: int) -> None:
        """A backend's metrics page reports `count` data-parallel ranks; 1: a single engine."""
        if members.set_ranks(count):
            self._update_pods()
            self.invalidate_views()

    def learn_adapters(self, reported: AdapterSlots) -> None:
        """An engine reports these LoRA adapters."""
        names = reported.running | reported.waiting
        is_new = not names <= self._adapters.keys()
        for name in names:
            self._adapters.pop(name, None)
            self._adapters[name] = None
        while len(self._adapters) > MAX_ADAPTERS:
            del self._adapters[next(iter(self._adapters))]
        if is_new:
            # Views by model name distinguish adapters from other names that no backend lists.
            self.invalidate_views()

    def is_adapter(self, model: str | None) -> bool:
        """Whether some engine reported `model` as a LoRA adapter."""
        return model in self._adapters

    @property
    def depends_on_model(self) -> bool:
        """Whether a request's model decides which pods may serve it, or whether any does, or what
        it is to meet."""
        named = self._adapters or self._removed_models or self.expected_models or self.objectives
        return self.has_mixed_models or bool(named)

    def use_adapter(self, model: str | None, pods: Iterable[Pod]) -> None:
        """A request for `model` was placed on `pods`: if it is an adapter, they will hold it."""
        if model is not None and model in self._adapters:
            for pod in pods:
                pod.adapters.use(model)

    def invalidate_views(self) -> None:
        """Drop the cached views: health, addresses or pairs changed."""
        self._members.clear()
        self._views.clear()
        self.members_version += 1

    def invalidate_scores(self) -> None:
        """Renew the cached views: gauges changed, and with them the scores of steady scorers."""
        self._views.clear()

    @property
    def models(self) -> tuple[str, ...]:
        """The model names that backends list, sorted."""
        return tuple(sorted(self._models))

    def can_serve(self, model: str) -> bool:
        """Whether some backend, healthy or not, may serve `model`, or one is expected to come; True
        for an empty fleet."""
        # A backend without a model list may serve any model, and an empty fleet may be filled
        # later: neither case is the client's error.
        is_known = model in self._models or model in self.expected_models
        return is_known or self._serves_any_model or not self

    def was_removed_recently(self, model: str, now: float) -> bool:
        """Whether the last backend that lists `model` went less than REMOVED_MODEL_SECONDS before
        `now` (Unix seconds)."""
        removed = self._removed_models.get(model, -REMOVED_MODEL_SECONDS)
        return now - removed < REMOVED_MODEL_SECONDS

    def model_key(self, model: str | None) -> str | None:
        """`model`, or one key for all names that no backend lists: clients cannot grow a table."""
        return model if model is None or self.knows_model(model) else UNLISTED

    def knows_model(self, model: str) -> bool:
        """Whether a backend lists `model`, an engine reported it as a LoRA adapter, or it is an
        expected one."""
        return model in self._models or model in self._adapters or model in self.expected_models

    def ready_pods(self, model: str | None) -> tuple[Pod, ...]:
        """Pods of any role that may be chosen for `model`; one without a model list serves any."""
        key = self.model_key(model)
        return self._view(key, lambda: self._find_ready(key))

    def prefill_candidates(self, model: str | None, decode: Pod) -> tuple[Pod, ...]:
        """The pods to choose a prefill from for `decode`: `kv_compatible` pods, without those whose
        first hand-off to `decode` is still under way, unless no other pod can hand off to it."""
        if not decode.unwarmed_prefills:
            return self.kv_compatible(model, decode)
        # Per decode pod, because `unwarmed_prefills` is its own. WarmUps invalidates the views
        # whenever it changes that set.
        key = ("warm", self.model_key(model), decode.name)
        return self._view(key, lambda: _without_unwarmed(self.kv_compatible(model, decode), decode))

    def kv_compatible(self, model: str | None, decode: Pod) -> tuple[Pod, ...]:
        """The pods of `ready_pods(model)` whose KV `decode` can read. Pods that must not prefill
        because of their role may be among them: the prefill profile's role filter drops them.
        Returns `ready_pods(model)` itself, not a copy, when no pod is ruled out."""
        ready = self.ready_pods(model)
        # Pods with the same role, hash and models share one view: no unified pod prefills for
        # another, so the view of one never contains the other.
        key = ("compatible", self.model_key(model), pairing_key(decode))
        is_partner = is_kv_compatible if decode.backend.role is Role.DECODE else can_hand_off
        view = self._view(key, lambda: tuple(pod for pod in ready if is_partner(pod, decode)))
        # The same object, so that profiles reuse the scores they computed for it.
        return ready if len(view) == len(ready) else view

    def can_exchange(self, pod: Pod, decode: Pod) -> bool:
        """Whether `pod` may prefill for `decode` where the cost decides: because of its role, or as
        another unified pod. Unified pods have a connector where prefill pods are beside them."""
        if can_hand_off(pod, decode):
            return True
        is_other = pod is not decode and are_alike_unified(pod, decode)
        return is_other and self.is_disaggregated(decode)

    def pods_with_prefill(self, model: str | None) -> tuple[Pod, ...]:
        """The pods of `ready_pods(model)` to which another of them can hand off."""
        key = self.model_key(model)
        return self._view(("with prefill", key), lambda: _find_with_prefill(self.ready_pods(model)))

    def is_disaggregated(self, decode: Pod) -> bool:
        """Whether some other backend, ready or not, may prefill for `decode`."""
        key = ("disaggregated", pairing_key(decode))
        if (fact := self._facts.get(key)) is None:
            fact = self._facts[key] = any(can_prefill_for(pod, decode) for pod in self)
        return fact

    def has_prefill_candidate(self, model: str | None, decode: Pod) -> bool:
        """Whether a pod of `prefill_candidates(model, decode)` can hand off to `decode`."""
        unwarmed = decode.name if decode.unwarmed_prefills else None
        key = ("candidate", self.model_key(model), pairing_key(decode), unwarmed)
        # A view, because it depends on readiness: empty for False.
        return bool(self._view(key, lambda: self._first_candidate(model, decode)))

    def _update_pods(self) -> None:
        """Take over the backends' pods, and forget the prompts of those that are gone."""
        before, self._pods = self._pods, pods_by_name(self._backends.values())
        for pod in {*before.values()} - {*self._pods.values()}:
            pod.has_left = True
            self.prefixes.remove_pod(pod)
        domains = domains_of_nodes(pod.backend for pod in self)
        for pod in self:
            pod.place = place_of(pod.backend, domains)
        self.stores.assign(self)
        self.figures.set_pods(self)

    def _view(self, key: object, find: Callable[[], tuple[Pod, ...]]) -> tuple[Pod, ...]:
        if (view := self._views.get(key)) is None:
            if (members := self._members.get(key)) is None:
                members = self._members[key] = find()
            # A new object for the same pods: identity tells profiles whether gauges changed.
            view = self._views[key] = (*members,)
        return view

    def _find_ready(self, key: str | None) -> tuple[Pod, ...]:
        ready = tuple(
            pod
            for pod in self
            if pod.ready and (key is None or not pod.backend.models or key in pod.backend.models)
        )
        if key is not None and key in self._adapters:
            ready = loadable(key, ready)
        return available(ready)

    def _first_candidate(self, model: str | None, decode: Pod) -> tuple[Pod, ...]:
        candidates = self.prefill_candidates(model, decode)
        return next(((pod,) for pod in candidates if can_hand_off(pod, decode)), ())


def loadable(adapter: str, pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
    """`pods` without those that cannot load `adapter` now, unless no pod of their role can: there
    the request waits for a slot."""
    roles = {pod.backend.role for pod in pods if pod.adapters.can_load(adapter)}
    return tuple(
        pod for pod in pods if pod.backend.role not in roles or pod.adapters.can_load(adapter)
    )


def _find_with_prefill(ready: tuple[Pod, ...]) -> tuple[Pod, ...]:
    # Once per key, not per pod: a hundred alike pods have one key.
    keys: dict[object, bool] = {}
    for pod in ready:
        key = pairing_key(pod)
        if key not in keys:
            keys[key] = any(can_hand_off(other, pod) for other in ready)
    return tuple(pod for pod in ready if keys[pairing_key(pod)])


def _without_unwarmed(compatible: tuple[Pod, ...], decode: Pod) -> tuple[Pod, ...]:
    view = tuple(pod for pod in compatible if pod not in decode.unwarmed_prefills)
    # A cold pair still beats no disaggregation at all.
    return view if any(can_hand_off(pod, decode) for pod in view) else compatible
