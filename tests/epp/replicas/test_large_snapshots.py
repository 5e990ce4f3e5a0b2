"""The snapshot that a busy replica of a large fleet sends to another one."""

from array import array
from itertools import count
from random import Random

from tandem_contract.fabric_classes import FabricClass
from tandem_epp.estimates.pod_estimates import PodEstimates
from tandem_epp.replicas.peers.frames import Frame, RequestStarted, decode_frame, encode_event
from tandem_epp.replicas.peers.outbox import MAX_QUEUE, Outbox
from tandem_epp.replicas.shared_fleet import SNAPSHOT_BYTES, SharedFleet
from tandem_planner.prefill_fit import prefill_sample

from ..placement.test_picker import NOW, PickerSetup

PODS = 1000
MIB = 1 << 20


def measure(estimates: PodEstimates, random: Random) -> None:
    """Let each fit of a pod have many samples."""
    for _ in range(40):
        size, seconds = 1e9 * random.random(), random.random()
        estimates.prefill.add(prefill_sample([(1.0 + 1e3 * random.random(), 5.0)], seconds), NOW)
        estimates.decode.add(1.0 + random.random(), seconds, NOW)
        for fabric in FabricClass:
            estimates.add_transfers((1, size, seconds), NOW, fabric)


def test_the_snapshot_of_a_thousand_pods_completes_while_other_events_come() -> None:
    setup = PickerSetup(**{f"pod-{i}": "decode" for i in range(PODS)})
    random = Random(1)
    for number, pod in enumerate(setup.fleet):
        measure(pod.estimates, random)
        hashes = range(number << 32, (number << 32) + SNAPSHOT_BYTES // 8 // PODS + 1)
        setup.fleet.prefixes.confirm(setup.fleet.prefixes.place(pod, array("Q", hashes)))
    shared = SharedFleet(setup.fleet, lambda: NOW)
    outbox = Outbox(count(), lambda: map(encode_event, shared.snapshot()))
    placed = encode_event(RequestStarted(1, "pod-0", chain=bytes(MAX_QUEUE // 100)))
    size, frames = 0, list[Frame]()
    while not frames or not frames[-1].is_complete:
        data = outbox.next_frame().data
        frames.append(decode_frame(data))
        assert frames[-1].number == len(frames) - 1, "the queue overflowed"
        size += len(data)
        outbox.put(placed)
    assert len(frames) > 10
    assert size < SNAPSHOT_BYTES + 4 * MIB
