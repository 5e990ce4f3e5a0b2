from tandem_contract.transfer_params import TransferParams
from tandem_engine.blocks import BlockManager
from tandem_engine.scheduler import Scheduler, Step
from tandem_engine.step import Phase, Rear, Sequence
from tandem_engine.types import Request, SamplingParams

PARAMS = TransferParams("P", "r", "127.0.0.1", 1, ((0,),))


class Bench:
    """A scheduler over 4-token blocks; sequences are numbered in order of arrival."""

    def __init__(
        self,
        *,
        blocks: int = 20,
        max_seqs: int = 8,
        max_tokens: int = 16,
        max_chunk: int | None = None,
    ) -> None:
        self.blocks = BlockManager(blocks, 4)
        self.scheduler = Scheduler(
            self.blocks, max_seqs=max_seqs, max_tokens=max_tokens, max_chunk=max_chunk
        )
        self._order = 0

    def add(self, length: int, remote: TransferParams | None = None) -> Sequence:
        self._order += 1
        first = 100 * self._order
        request = Request(
            str(self._order), tuple(range(first, first + length)), SamplingParams(max_tokens=50)
        )
        seq = Sequence(request, self._order, 0, frozenset(), 0.0, remote)
        self.scheduler.add(seq)
        return seq

    def step(self) -> list[tuple[str, int, int, bool]]:
        """Run one step. Returns id, start, end and whether a token was sampled, for each chunk."""
        return self.run(self.scheduler.schedule())

    def run(self, step: Step) -> list[tuple[str, int, int, bool]]:
        for chunk in step.chunks:
            self.scheduler.advance(chunk, 7 if chunk.draw else None)
        return [(c.sequence.id, c.start, c.end, c.draw is not None) for c in step.chunks]


def test_decodes_come_first_then_chunks_within_the_budget() -> None:
    bench = Bench(max_tokens=10)
    bench.add(6)
    bench.add(20)
    assert bench.step() == [("1", 0, 6, True), ("2", 0, 4, False)]
    bench.add(3)
    assert bench.step() == [("1", 6, 7, True), ("2", 4, 13, False)]
    assert bench.step() == [("1", 7, 8, True), ("2", 13, 20, True), ("3", 0, 2, False)]
    assert bench.step() == [("1", 8, 9, True), ("2", 20, 21, True), ("3", 2, 3, True)]


def test_a_prompt_takes_small_chunks_beside_others_and_large_ones_alone() -> None:
    bench = Bench(max_tokens=10, max_chunk=3)
    bench.add(16)
    assert bench.step() == [("1", 0, 10, False)]
    other = bench.add(5)
    assert bench.step() == [("1", 10, 13, False), ("2", 0, 3, False)]
    bench.scheduler.remove(other)
    assert bench.step() == [("1", 13, 16, True)]
    assert bench.step() == [("1", 16, 17, True)]


def test_sequences_are_admitted_in_order_of_arrival() -> None:
    bench = Bench(max_seqs=1)
    first = bench.add(2)
    bench.add(2)
    assert [c[0] for c in bench.step()] == ["1"]
    assert [c[0] for c in bench.step()] == ["1"]
    bench.scheduler.remove(first)
    assert [c[0] for c in bench.step()] == ["2"]


def test_a_smaller_request_does_not_overtake_one_that_does_not_fit() -> None:
    bench = Bench(blocks=4)
    bench.add(8)
    bench.add(12)
    bench.add(1)
    assert [c[0] for c in bench.step()] == ["1"]
    assert bench.scheduler.waiting == 2


def test_the_youngest_is_preempted_and_admitted_again_first() -> None:
    bench = Bench(blocks=4)
    first, second = bench.add(8), bench.add(7)
    assert len(bench.step()) == 2
    step = bench.scheduler.schedule()
    assert step.preempted == [second]
    assert bench.run(step) == [("1", 8, 9, True)]
    assert (second.phase, second.computed_tokens, second.tokens[-1]) == (Phase.WAITING, 0, 7)
    bench.add(1)
    assert [c[0] for c in bench.step()] == ["1"]
    bench.scheduler.remove(first)
    step = bench.scheduler.schedule()
    assert (step.chunks[0].sequence, step.chunks[0].start) == (second, 4)
    assert step.admitted == [step.chunks[1].sequence]


def test_the_oldest_preempts_itself_when_a_hold_has_the_other_blocks() -> None:
    bench = Bench(blocks=3)
    finished_seq, seq = bench.add(3), bench.add(8)
    bench.step()
    bench.scheduler.remove(finished_seq, hold=True)
    assert bench.step() == []
    assert seq.phase is Phase.WAITING
    bench.blocks.release_hold(finished_seq.id)
    assert bench.step() == [("2", 8, 9, True)]


def test_a_request_joins_the_running_batch_in_the_first_step_after_its_kv_is_there() -> None:
    bench = Bench()
    bench.add(4)
    assert bench.step() == [("1", 0, 4, True)]
    remote = bench.add(10, PARAMS)
    step = bench.scheduler.schedule()
    assert step.pulls == [remote]
    assert bench.run(step) == [("1", 4, 5, True)]
    assert bench.step() == [("1", 5, 6, True)], "the batch goes on while the KV arrives"
    bench.scheduler.finish_loading(remote, 9)
    assert bench.step() == [("1", 6, 7, True), ("2", 9, 10, True)]
    assert bench.step() == [("1", 7, 8, True), ("2", 10, 11, True)]


def test_remote_kv_loads_beside_the_running_and_leaves_one_token_to_compute() -> None:
    bench = Bench(max_seqs=1)
    running = bench.add(4)
    remote = bench.add(10, PARAMS)
    step = bench.scheduler.schedule()
    assert (step.pulls, [c.sequence for c in step.chunks]) == ([remote], [running])
    assert (bench.scheduler.loading, len(bench.blocks.table("2"))) == (1, 3)
    bench.run(step)
    bench.scheduler.finish_loading(remote, 9)
    assert [c[0] for c in bench.step()] == ["1"]
    bench.scheduler.remove(running)
    assert bench.step() == [("2", 9, 10, True)]


def test_a_failed_load_is_computed_in_the_blocks_it_has() -> None:
    bench = Bench()
    remote = bench.add(10, PARAMS)
    assert bench.scheduler.schedule().chunks == []
    bench.scheduler.finish_loading(remote, 0)
    assert bench.step() == [("1", 0, 10, True)]


def test_remote_kv_of_a_cached_prompt_is_not_pulled() -> None:
    bench = Bench()
    first = bench.add(8)
    bench.step()
    bench.scheduler.remove(first)
    readmitted = Sequence(
        Request("2", first.request.prompt_token_ids), 2, 0, frozenset(), 0.0, transfer_params=PARAMS
    )
    bench.scheduler.add(readmitted)
    step = bench.scheduler.schedule()
    assert (step.unneeded_transfers, step.pulls, readmitted.transfer_params) == (
        [(readmitted, PARAMS)],
        [],
        None,
    )
    assert bench.run(step) == [("2", 4, 8, True)]


def test_every_sequence_is_listed_until_it_ends() -> None:
    bench = Bench(max_seqs=1)
    seqs = [bench.add(2), bench.add(2), bench.add(9, PARAMS)]
    bench.step()
    assert set(bench.scheduler) == set(seqs)
    for seq in seqs:
        bench.scheduler.remove(seq)
    assert (list(bench.scheduler), bench.blocks.free_count) == ([], 20)


def test_a_prompt_is_computed_up_to_its_rear_and_goes_on_after_it() -> None:
    bench = Bench(max_tokens=10)
    seq = bench.add(30)
    seq.rear = Rear(start=12, end=28, front=0)
    assert bench.step() == [("1", 0, 10, False)]
    assert seq.rear.front == 10
    assert bench.step() == [("1", 10, 12, False)]
    step = bench.scheduler.schedule()
    assert (step.chunks, step.awaiting_rear) == ([], [seq])
    # The load ended early: a part of its tokens is computed.
    seq.rear.start, seq.rear.is_loading = 16, False
    bench.scheduler.finish_loading(seq, 12)
    assert bench.step() == [("1", 12, 16, False)]
    assert (seq.rear, seq.computed_tokens) == (None, 28)
    assert bench.step() == [("1", 28, 30, True)]


def test_a_sequence_into_which_a_rear_is_loaded_is_not_preempted() -> None:
    bench = Bench(blocks=8, max_tokens=64)
    bench.add(8)
    second, youngest = bench.add(8), bench.add(12)
    youngest.rear = Rear(start=4, end=11, front=0)
    assert bench.step() == [("1", 0, 8, True), ("2", 0, 8, True), ("3", 0, 4, False)]
    # One block is left for the next tokens of two sequences.
    step = bench.scheduler.schedule()
    assert step.preempted == [second]
    assert bench.run(step) == [("1", 8, 9, True)]
    youngest.rear.is_loading = False
    bench.scheduler.finish_loading(youngest, 0)
    assert youngest.computed_tokens == 11


def test_a_rear_that_is_loaded_is_lost_with_the_blocks() -> None:
    bench = Bench(blocks=5, max_tokens=12)
    bench.add(8)
    youngest = bench.add(12)
    youngest.rear = Rear(start=8, end=11, front=0, is_loading=False)
    assert bench.step() == [("1", 0, 8, True), ("2", 0, 4, False)]
    assert bench.scheduler.schedule().preempted == [youngest]
    assert (youngest.rear, youngest.computed_tokens) == (None, 0)
