"""Models that are downloaded before the pods of a new revision start: `model.cache.prePull`. Pure.

    plan_pulls(observed, pools, targets, defaults) -> ModelPulls

One Job for each set and model asks the hub which commit the revision is, downloads the files in
parts and reports in termination messages; the operator itself calls nothing outside. Pools that
wait keep their present pods. Then their ControllerRevisions pin the commit, so that all pods of a
revision run the same one. Pods of one set never run two commits of one branch: a later revision
gets the commit that is pinned already, and needs no Job where its claim has that commit's files.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tandem_contract import labels

from ..conditions import Reason
from ..observed import Failure, Observed, PoolResource, PullJob, PullPod, SetKey
from ..pods import engines
from ..pods.containers import ENGINE, container_security, pod_security
from ..pods.merge import merge
from ..pods.models import ModelDownload, PulledModel, download_before, pulled_model
from ..resources.pools import Pool, short_hash
from ..resources.resolve import Defaults
from . import revisions
from .actions import Create, Pull
from .pool_state import PoolState
from .revisions import Target

PARTS: Final = 5
"""Containers that share the files: one after the other, so that each that ends is progress."""
_RETRIES: Final = 5
"""Pods after the first, with the Job controller's back-off of 10 s, 20 s, 40 s, …"""
_KEPT: Final = 600
"""Seconds after its end at which Kubernetes deletes the Job; a failed one is then tried again."""
_RESOLVE: Final = "resolve"
_PLAN_FILE: Final = f"{engines.HOME}/model-download.json"
_REQUESTS: Final = {"cpu": "100m", "memory": "512Mi"}
_OF_TEMPLATE: Final[tuple[str, ...]] = (
    *("serviceAccountName", "priorityClassName", "imagePullSecrets", "volumes", "securityContext"),
    *("nodeSelector", "tolerations", "affinity", "hostAliases", "dnsPolicy", "dnsConfig"),
)
"""Fields of the pool's template that the Job's pod has as well: who it is, where it may run, and
what it needs to reach the hub."""
_OF_ENGINE: Final[tuple[str, ...]] = ("env", "envFrom", "volumeMounts")
"""Those of the template's engine container, for each of the Job's: a private authority, say."""
_GIVEN_UP: Final = (
    "; Kubernetes has given it up and deletes it after 10 minutes, when the next attempt starts."
    " After a correction, kubectl delete job {name} starts it at once"
)


@dataclass(frozen=True)
class ModelPulls:
    """By pool name, as in `PoolState`: what its new revision pins, or what it waits for."""

    pulled: Mapping[str, PulledModel] = field(default_factory=dict)
    waiting: Mapping[str, Pull] = field(default_factory=dict)
    create: tuple[Create, ...] = ()
    delete: tuple[PullJob, ...] = ()


def plan_pulls(
    observed: Observed,
    pools: Sequence[PoolState],
    targets: Mapping[str, Target],
    defaults: Defaults,
) -> ModelPulls:
    """The downloads of a set. `targets`: those of the pools that may roll."""
    # Sorted, so that the newest revision that pins a commit is the one that counts.
    states = sorted((state for pool in pools for state in pool.pinned), key=lambda s: s.created)
    pinned = [model for state in states if (model := pulled_model(state.template))]
    jobs = {job.name: job for job in observed.pull_jobs}
    pulled: dict[str, PulledModel] = {}
    waiting: dict[str, Pull] = {}
    sources: dict[tuple[str, str | None], Pull] = {}
    create, needed = [], set[str]()
    for pool in pools:
        valid = pool.validation.pool
        download = _missing_download(pool, targets.get(pool.name), defaults)
        if valid is None or download is None:
            continue
        if (known := _known(download, pinned)) is not None:
            pulled[pool.name] = known
            continue
        # One Job for the set. With two claims, the second waits until the commit is known.
        if (pull := sources.get(download.source)) is not None:
            waiting[pool.name] = pull
            continue
        revision = _revision_to_pull(download, pinned)
        pod_spec = _pod_spec(valid, download, revision, defaults)
        body = _job(observed.key, pool.resource, pod_spec)
        name = body["metadata"]["name"]
        job, pods = jobs.get(name), _pods_of(jobs.get(name), observed.pull_pods)
        commit = _commit(pods)
        # A complete Job whose pods were deleted has lost the commit: another one finds the files.
        if commit or not (job and job.is_complete):
            needed.add(name)
        if commit is not None:
            pinned.append(PulledModel(download, commit))
            pulled[pool.name] = pinned[-1]
            continue
        # A paused or refused pool needs no new Job, but keeps one that it has.
        if job is None and pool.name in targets:
            create.append(Create(pool.resource.key, body))
        waiting[pool.name] = sources[download.source] = _pull(name, download, job, pods)
    delete = tuple(job for job in observed.pull_jobs if job.name not in needed)
    return ModelPulls(pulled, waiting, tuple(create), delete)


def _missing_download(
    pool: PoolState, target: Target | None, defaults: Defaults
) -> ModelDownload | None:
    """What must be downloaded before the pool's spec can become a revision."""
    valid = pool.validation.pool
    if valid is None:
        return None
    if target is None:
        is_pinned = revisions.is_pinned(valid, pool.pinned, defaults)
    else:
        is_pinned = target.pinned is not None
    return None if is_pinned else download_before(valid)


def _known(download: ModelDownload, pinned: Sequence[PulledModel]) -> PulledModel | None:
    """The commit that the set has downloaded to this very claim; the newest."""
    return next((each for each in reversed(pinned) if each.download == download), None)


def _pods_of(job: PullJob | None, pods: Iterable[PullPod]) -> list[PullPod]:
    """A Job's pods, oldest first; not those of an earlier Job of its name."""
    own = [pod for pod in pods if job is not None and pod.owner == job.uid]
    return sorted(own, key=lambda pod: (pod.created, pod.name))


def _commit(pods: Iterable[PullPod]) -> str | None:
    done = (pod.reports.get(_RESOLVE) for pod in pods if pod.is_done)
    return next((report.commit for report in done if report is not None), None)


def _pull(name: str, download: ModelDownload, job: PullJob | None, pods: Sequence[PullPod]) -> Pull:
    """What a pool says about the Job while it waits."""
    last = pods[-1] if pods else None
    trouble = last.trouble if last else None
    if job is not None and job.failure is not None:
        text = f"Job {name}: {trouble or job.failure}{_GIVEN_UP.format(name=name)}"
        return Pull(name, text, failure=Failure(Reason.MODEL_PULL_FAILS, text))
    if trouble:
        text = f"Job {name}: {trouble}"
        return Pull(name, text, failure=Failure(Reason.MODEL_PULL_FAILS, text))
    if last is None:
        text = f"Job {name} has no pod yet: kubectl describe job {name} says why"
        return Pull(name, text, has_pod=False)
    reports = last.reports
    model = reports.get(_RESOLVE)
    if model is None:
        revision = download.revision or "the main branch"
        text = f"Job {name} asks the hub for the commit of {revision} of {download.repository}"
        return Pull(name, text)
    parts = [report for container, report in reports.items() if container != _RESOLVE]
    done, files = sum(part.bytes for part in parts), sum(part.files for part in parts)
    return Pull(
        name,
        f"Job {name} downloads {download.repository}: {done / 1e9:.1f} of {model.bytes / 1e9:.1f}"
        f" GB, {files} of {model.files} files",
        progress={
            "commit": model.commit,
            "bytes": done, "totalBytes": model.bytes, "files": files, "totalFiles": model.files,
        },
    )  # fmt: skip


def _revision_to_pull(download: ModelDownload, pinned: Sequence[PulledModel]) -> str:
    """The commit that another claim of the set has, else the spec's revision; empty: main."""
    same = [model.commit for model in pinned if model.download.source == download.source]
    return same[-1] if same else download.revision or ""


def _job(key: SetKey, owner: PoolResource, pod_spec: Mapping[str, Any]) -> dict[str, Any]:
    """The Job; named by its content, so that a corrected spec is tried at once."""
    own_labels = {
        labels.POOL: key.name,
        labels.MODEL_PULL: key.kind,
        labels.MANAGED_BY: "tandem-operator",
    }
    content = {"set": [key.kind, key.name], "pod": pod_spec}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            # Names of pods and the label with the Job's name have 63 characters at most.
            "name": f"{key.name[:40].rstrip('-.')}-pull-{short_hash(content)}",
            "namespace": key.namespace,
            "labels": own_labels,
            "ownerReferences": [revisions.owner_reference(owner)],
        },
        "spec": {
            "backoffLimit": _RETRIES,
            "ttlSecondsAfterFinished": _KEPT,
            "template": {"metadata": {"labels": own_labels}, "spec": pod_spec},
        },
    }


def _pod_spec(
    pool: Pool, download: ModelDownload, revision: str, defaults: Defaults
) -> dict[str, Any]:
    """Where the pool's pods may run, with what their downloads need."""
    accelerator = pool.spec.accelerator
    needs = engines.download_needs(pool)
    secrets = [*defaults.image_pull_secrets, *(s.name for s in pool.spec.image_pull_secrets)]
    # The hub's own library, without a progress bar for each file in the log.
    online = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    users = {variable["name"]: variable for variable in pool.spec.engine.env}
    env = [
        *engines.downward_api(),
        *engines.env_vars({n: v for n, v in needs.env.items() if n not in users}),
        *users.values(),
    ]
    template = pool.spec.template.spec
    patch = {name: template[name] for name in _OF_TEMPLATE if name in template}
    engine = _engine_of(template)

    def container(name: str, *arguments: str) -> dict[str, Any]:
        program = ["python3", "-m", "tandem_operator.pods.model_download"]
        command, *rest = arguments
        own = {
            "name": name,
            "image": defaults.tandem_image,
            **({"imagePullPolicy": defaults.pull_policy} if defaults.pull_policy else {}),
            "command": [*program, command, _PLAN_FILE, download.repository, *rest],
            "env": env,
            **({"envFrom": list(pool.spec.engine.env_from)} if pool.spec.engine.env_from else {}),
            "resources": {"requests": _REQUESTS},
            "securityContext": container_security(read_only=True),
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": needs.mounts,
        }
        merged = merge(own, engine)
        others = [variable for variable in merged["env"] if variable.get("name") not in online]
        # Pods may be offline, since all they load is here.
        return {**merged, "env": [*others, *engines.env_vars(online)]}

    parts = [container(f"part-{i}", "part", str(i)) for i in range(PARTS)]
    spec = {
        # Not OnFailure: the Job controller would delete the pod that says why it failed.
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(assigned_user=defaults.assigned_users),
        **({"imagePullSecrets": [{"name": n} for n in dict.fromkeys(secrets)]} if secrets else {}),
        **({"nodeSelector": dict(accelerator.node_selector)} if accelerator.node_selector else {}),
        **({"tolerations": list(accelerator.tolerations)} if accelerator.tolerations else {}),
        "initContainers": [container(_RESOLVE, "resolve", revision, str(PARTS)), *parts[:-1]],
        "containers": parts[-1:],
        "volumes": needs.volumes,
    }  # fmt: skip
    return merge(spec, patch)


def _engine_of(template: Mapping[str, Any]) -> dict[str, Any]:
    """What a template says of the engine's container, as far as the Job's containers need it."""
    containers = template.get("containers")
    for container in containers if isinstance(containers, list) else ():
        if isinstance(container, Mapping) and container.get("name") == ENGINE:
            parts = {name: container.get(name) for name in _OF_ENGINE}
            return {name: value for name, value in parts.items() if isinstance(value, list)}
    return {}
