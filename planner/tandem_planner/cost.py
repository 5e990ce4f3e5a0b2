"""The predicted cost of serving a request on given pods, in seconds, and the choice by it. Pure.

    unified(D)  = wait(D) + load(D) + prefill(D) + stall(D) + congestion(D) + eviction(D)
                + decode(D) + preemption(D) + standing(D) + miss(D)
    split(P, D) = wait(P) + load(P) + prefill(P) + stall(P) + congestion(P) + standing(P) + miss(P)
                + transfer(P, D) + handoff + join(P, D) + decode(D) + preemption(D) + standing(D)

    miss        of models with objectives: `objective`, which adds to `stall` too
    wait        seconds of prefill work ahead in the pod's queue
    load        from external storage, what is there of the prompt and pays: `storage`; what is
                loaded counts as cached for the prefill
    prefill     a + b n + c (n² + 2 n cached), n uncached tokens on the pod that computes them
    stall       prefill × (ITL_WEIGHT × Σ 1 / tokens + DECODE_RESERVE), the sum over the answers of
                that pod, also those whose prompts are computed before: the prefill delays each by
                its seconds once, which its mean ITL shows the more, the fewer tokens it has; the
                reserve on decode pods
    congestion  prefill × u / (1 - u), u: the share of its time that the pod computes prompts, at
                most MOST_UTILIZATION: the later prompts that will wait behind this one; 0 between
                pods of separate pools
    eviction    prefill × what later prompts have to compute again, because this one takes room in
                the pod's cache: `eviction`; 0 while nothing is evicted, and between pods of
                separate pools
    transfer    KV bytes of the tokens not on D ÷ D's measured rate for transfers from pods as close
                as P (the fabric class of the pair) × the share that a first token waits for: in
                streamed hand-offs KV moves while P computes
    handoff     the extra round trips and what proxies do, learned (HANDOFF_SECONDS until then)
    join        max(0, wait(D) - ready) + step(D): D's engine admits requests in order, so a prompt
                that it computes itself delays the transfer beyond `ready`, when the KV is there
                (the least wait + prefill of all P); then the request joins a decode step
    decode      DECODE_WEIGHT × slope × decodes running on D × expected output tokens, at most
                LONG_ANSWER: what they slow this request down, and what it slows them down; of
                separate pools also OWN_STEP × step(D) × the same tokens: its own ITL
    preemption  prefill of the prompt once more × the share of prompt and output for which D has no
                free KV; what D loads needs room as what it computes
    standing    per request, whatever its prompt: FAILURE_SECONDS × error rate, loading an adapter

wait + load + prefill + transfer + handoff + join are the seconds until the first token; the rest is
harm and risk. Where the whole transfer exceeds MAX_TRANSFER_SHARE of prefill(D), which it would
save D, there is no split: streamed or not, transfers share the network. Among pods that can
exchange KV, the terms of P and those of D are independent within a fabric class, so the best P of a
class is the same for all D that are equally close: `choice` is O(P + D).
"""

from math import exp, inf
from typing import Final, NamedTuple

from tandem_contract.fabric_classes import FabricClass

from .fabrics import MAX_TRANSFER_SHARE
from .kv_size import KvSize
from .objective import ITL_WEIGHT, NO_OBJECTIVE, Objective, missed
from .prefill_fit import PREFILL_PRIOR
from .transfer import KV_BYTES_PRIOR, TRANSFERS_PRIOR, Transfers

DECODE_RESERVE: Final = 2.5
"""Harm per second of prefill on a decode pod, beside that to the answers which run there: to those
that it was set up to serve. A prefill there costs 3.5 times its time, so that prompts of a few
hundred tokens are split. Lower: the p99 ITL exceeds that of a set that splits all requests by more
(1.5: by 0.23 of it, 2: 0.16, 2.5: 0.11; `benchmarks.routing_rows`, 6 + 4 pods, five seeds). Higher:
it does not fall any more, and first tokens come later (2: p99 TTFT 0.88 of the best rival's, 2.5:
0.94)."""
SHORT_ANSWER: Final = 20.0
"""Tokens; shorter answers count as if they had so many. A second of prefill makes the mean ITL of
this one 50 ms longer, and a shorter one cannot be delayed more than too much."""
DECODE_WEIGHT: Final = 4.0
"""Harm per second of ITL that a decode gets and adds: two of each, because decodes last while
queues pass, and a pod that has many attracts long waits for memory later."""
LONG_ANSWER: Final = 200.0
"""Tokens; of longer answers `decode` counts so many. By its whole length an answer of 2,000 tokens
left the pod that caches its prompt for one with fewer decodes: with answers six times as long mean
and p99 TTFT were 1.2 and 1.3 times those of llm-d's default (`benchmarks.routing --regime "long
outputs"`), and with 100 to 400 tokens are at most equal. Other loads do not tell these apart."""
OWN_STEP: Final = ITL_WEIGHT / LONG_ANSWER
"""Harm per token and second of a step of D: the request's own mean ITL weighs ITL_WEIGHT, in
proportion less if its answer is shorter than LONG_ANSWER. With it the slowest of four decode pods,
where all of the longest ITL are, gets fewer answers: p99 ITL is 12.7, 14.1 and 12.4 ms, without it
13.4, 16.3 and 12.5, with three times as much 12.7, 15.0 and 12.8, and with ten times as much first
tokens come 7 % later (`benchmarks.routing_rows`, 6 + 4 pods, seeds 0 to 2)."""
HANDOFF_SECONDS: Final = 0.01
"""Seconds that a hand-off takes beside the other terms until it is measured: two round trips."""
FAILURE_SECONDS: Final = 5.0
"""Seconds that a failed request costs its client: it finds out and tries again."""
STREAMED_SHARE: Final = 0.1
"""Share of the transfer that a first token waits for in a streamed hand-off whose sidecar does not
say how long it waited: the last layers of the last chunk."""
MOST_UTILIZATION: Final = 0.9
"""Utilization that counts as the highest: there the harm to later prompts is nine times the
prefill. Higher: in a burst, which no pod can keep up with, a prompt would go far out of its way to
save computation. Lower: busy pods are not told from those that can hardly keep up."""
MOST_REUSED: Final = 0.9
"""Share of the uses that another one follows, in `eviction`, that counts as the highest."""
LATE_SHARE: Final = 0.5
"""The remaining seconds of a prefill that takes longer than predicted, as a share of its delay."""
TIE: Final = 1e-3
TIE_SHARE: Final = 0.03
"""Two costs are equal, and the choice between them is drawn, if they differ by no more than TIE
seconds, or TIE_SHARE of the cheapest way to serve the request: estimates are not more exact. Too
low: of alike pods at low load, the one that seemed faster once gets all the work, and the others
are never measured again. Too high: requests wait where they need not."""


def tie_seconds(least: float) -> float:
    """Seconds by which a cost may exceed that of the cheapest way to serve the request, `least`,
    and be equal to it."""
    return max(TIE, TIE_SHARE * least)


def congestion(utilization: float) -> float:
    """Seconds by which one second of prefill delays later prompts, on a pod that computes prompts
    for the share `utilization` of its time: u / (1 - u).

    Work of s seconds keeps a queue with random arrivals busy for s / (1 - u) seconds on average, as
    more work arrives meanwhile (the delay busy period: Kleinrock, *Queueing Systems*, volume 1,
    section 5.8). What is beyond s is the work that waits behind.
    """
    share = min(max(utilization, 0.0), MOST_UTILIZATION)
    return share / (1.0 - share)


def eviction(reused: float, age: float) -> float:
    """Seconds that later prompts compute again for each second of prefill, since its KV takes room
    in a full cache, which forgets what it used least recently.

    `reused`: share of the uses of cached tokens that another one follows before they are evicted;
    `age`: after which share of the time from a use to the eviction that one comes, on average. Both
    as observed; 0 without any.

    If the time to the next use is exponential, and on average x times shorter than that to the
    eviction, then of the share p of the uses that another one follows, 1 / e^x come too late, and
    x / e^x of other prompts', which leave earlier because of the tokens that are added. A prompt
    that is in time brings further uses, each of which costs as much: 1 / (1 - reused) in all.
    Observed are reused = p (1 - e^-x) and age = 1 / x - 1 / (e^x - 1).
    """
    if reused <= 0.0:
        return 0.0
    x = _turns(age)
    followed = min(1.0, reused / (1.0 - exp(-x)))
    harm = followed * (1.0 + x) * exp(-x) / (1.0 - min(reused, MOST_REUSED))
    return harm if harm >= TIE_SHARE else 0.0


def _turns(age: float) -> float:
    """The x for which 1 / x - 1 / (e^x - 1) is `age`, to 2 %. At least 0.01: from an `age` of 1/2
    on nothing says that what was used lately is used sooner."""
    share = min(max(age, 1e-3), 0.5)
    return max(0.01, (1.0 - 2.0 * share) * (1.0 + share * (2.2 + 3.6 * share)) / share)


def predicted_itl(step: float, utilization: float) -> float:
    """Mean seconds between two tokens of an answer on a pod whose decode steps take `step` seconds
    and which computes prompts for the share `utilization` of its time."""
    return step / (1.0 - min(utilization, MOST_UTILIZATION))


def stall_share(output: float) -> float:
    """By how much one second of prefill lengthens the mean ITL of an answer of `output` tokens, in
    seconds. An answer of one token has none."""
    return 1.0 / max(output, SHORT_ANSWER) if output > 1.0 else 0.0


class PodFigures(NamedTuple):
    """What the cost of a request on one pod depends on. Times are of one clock, in seconds."""

    head_ends: float = 0.0
    """When the prefill at the head of the queue is predicted to end; of no meaning without one."""
    late_share: float = 0.0
    """LATE_SHARE while a prefill is at the head, else 0."""
    queued: float = 0.0
    """Seconds of prefill work behind the head."""
    fixed: float = PREFILL_PRIOR.fixed
    per_token: float = PREFILL_PRIOR.per_token
    per_pair: float = PREFILL_PRIOR.per_pair
    stall: float = 0.0
    """Harm per second of prefill to the answers of this pod, begun or not."""
    itl_harm: float = 0.0
    """Seconds per output token that counts: the term `decode`."""
    free_tokens: float = inf
    """Tokens for which the KV cache has room."""
    standing: float = 0.0
    """Seconds per request, whatever its prompt."""
    transfers: Transfers = TRANSFERS_PRIOR
    kv: KvSize = KvSize(KV_BYTES_PRIOR)
    step: float = 0.0
    """Seconds of the decode step that a request joins after a hand-off."""
    exposed: float = 1.0
    """Share of the transfer, beyond its latency, that a first token waits for."""
    congestion: float = 0.0
    """Harm to later prompts per second of prefill."""
    load: float = 0.0
    """Seconds to load from external storage what this request's `cached` has from there."""
    loaded: int = 0
    """Tokens of this request's `cached` that are loaded: they need room in the KV cache first."""
    eviction: float = 0.0
    """Seconds that later prompts compute again per second of prefill."""


class RequestFigures:
    """What the cost of a request depends on, beside the pod."""

    __slots__ = (
        "decoded",
        "handoff",
        "is_any_transfer_short",
        "now",
        "objective",
        "output",
        "prompt",
    )

    def __init__(  # noqa: PLR0917 - what is asked, then the rules
        self,
        prompt: int,
        output: float,
        now: float,
        handoff: float = HANDOFF_SECONDS,
        is_any_transfer_short: bool = False,
        objective: Objective = NO_OBJECTIVE,
    ) -> None:
        self.prompt = prompt
        """Tokens."""
        self.output = output
        """Tokens expected."""
        self.decoded = min(output, LONG_ANSWER)
        """Of them those that count in `decode`."""
        self.now = now
        self.handoff = handoff
        """Seconds of a hand-off without its transfer."""
        self.is_any_transfer_short = is_any_transfer_short
        """Whether no transfer takes too long for a split: not every pod may serve the request
        alone."""
        self.objective = objective
        """Of the model."""


class CostTerms(NamedTuple):
    """The terms of one pod's cost, in seconds; their sum is the cost."""

    wait: float = 0.0
    prefill: float = 0.0
    stall: float = 0.0
    congestion: float = 0.0
    transfer: float = 0.0
    handoff: float = 0.0
    join: float = 0.0
    decode: float = 0.0
    preemption: float = 0.0
    standing: float = 0.0
    load: float = 0.0
    miss: float = 0.0
    eviction: float = 0.0

    @property
    def first_token(self) -> float:
        """Seconds until the first token; the rest is harm and risk."""
        return self.wait + self.load + self.prefill + self.transfer + self.handoff + self.join


def wait_seconds(pod: PodFigures, now: float) -> float:
    """Seconds of prefill work ahead of a request that arrives `now`."""
    if not pod.late_share:
        return pod.queued
    left = pod.head_ends - now
    return pod.queued + (left if left > 0.0 else -left * pod.late_share)


def first_token_seconds(request: RequestFigures, pod: PodFigures, cached: int) -> float:
    """Predicted seconds until `pod`, which has `cached` tokens of the prompt, has computed it:
    wait, load and prefill, the first token of a request that is not split."""
    return wait_seconds(pod, request.now) + pod.load + idle_prefill_seconds(request, pod, cached)


def join_seconds(request: RequestFigures, pod: PodFigures, ready: float) -> float:
    """The term `join` on the decode pod `pod`, if the KV is there in `ready` seconds."""
    return max(0.0, wait_seconds(pod, request.now) - ready) + pod.step


def unified_terms(request: RequestFigures, pod: PodFigures, cached: int) -> CostTerms:
    """The terms of `unified(D)`. `cached` tokens of the prompt are on D, or will be by then."""
    return prefill_terms(request, pod, cached)._replace(
        decode=pod.itl_harm * request.decoded,
        preemption=preemption_seconds(request, pod, max(0, cached - pod.loaded)),
    )


def prefill_terms(request: RequestFigures, pod: PodFigures, cached: int) -> CostTerms:
    """The terms of `split(P, D)` that depend on P, which has `cached` tokens of the prompt."""
    prefill = idle_prefill_seconds(request, pod, cached)
    terms = CostTerms(
        wait=wait_seconds(pod, request.now),
        prefill=prefill,
        stall=prefill * pod.stall,
        congestion=prefill * pod.congestion,
        standing=pod.standing,
        load=pod.load,
        eviction=prefill * pod.eviction,
    )
    if not (objective := request.objective).miss:
        return terms
    return terms._replace(miss=objective.miss * missed(terms.first_token, objective.ttft))


def decode_terms(
    request: RequestFigures,
    pod: PodFigures,
    cached: int,
    fabric: FabricClass = FabricClass.ELSEWHERE,
    ready: float = inf,
) -> CostTerms:
    """The terms of `split(P, D)` that depend on D, which has `cached` tokens of the prompt, for the
    pods P that form pairs of the class `fabric` with it. `ready`: when the KV is there, in seconds;
    inf: after D's own prefills."""
    return CostTerms(
        transfer=transfer_seconds(request, pod, cached, fabric),
        handoff=request.handoff,
        join=join_seconds(request, pod, ready),
        decode=pod.itl_harm * request.decoded,
        preemption=preemption_seconds(request, pod, cached),
        standing=pod.standing,
    )


def is_transfer_too_long(
    request: RequestFigures,
    pod: PodFigures,
    cached: int,
    fabric: FabricClass = FabricClass.ELSEWHERE,
) -> bool:
    """Whether the transfer to `pod`, which has `cached` tokens of the prompt, rules out a split
    with the pods that form pairs of the class `fabric` with it."""
    longest = MAX_TRANSFER_SHARE * idle_prefill_seconds(request, pod, cached)
    whole = pod._replace(exposed=1.0)
    return transfer_seconds(request, whole, cached, fabric) > longest


def idle_prefill_seconds(request: RequestFigures, pod: PodFigures, cached: int) -> float:
    """What the prefill would take on an idle pod that is as fast as `pod`. At least one token is
    computed, whatever is cached."""
    uncached = _uncached(request, cached)
    return _prefill(pod, uncached, max(1, request.prompt) - uncached)


def transfer_seconds(
    request: RequestFigures, pod: PodFigures, cached: int, fabric: FabricClass
) -> float:
    """The term `transfer` to `pod`, which has `cached` tokens of the prompt, in pairs of the class
    `fabric`."""
    size = pod.kv.bytes(_uncached(request, cached))
    latency, per_byte = pod.transfers[fabric]
    return latency + per_byte * size * pod.exposed


def preemption_seconds(request: RequestFigures, pod: PodFigures, cached: int) -> float:
    """Expected seconds to compute the prompt once more, because KV ran out on `pod`, which has the
    KV of `cached` tokens already: without what is loaded or transferred."""
    needed = _uncached(request, cached) + request.output
    if needed <= pod.free_tokens:
        return 0.0
    return (needed - max(0.0, pod.free_tokens)) / needed * _prefill(pod, request.prompt, 0)


def _uncached(request: RequestFigures, cached: int) -> int:
    return max(1, request.prompt - cached)


def _prefill(pod: PodFigures, uncached: float, cached: int) -> float:
    return pod.fixed + uncached * (pod.per_token + pod.per_pair * (uncached + 2 * cached))
