"""The engines of the live judge of flow control."""

from benchmarks.flow_engines import BUDGET, REQUESTS, PacedEngine, Running, Switches


async def test_a_step_has_a_token_of_each_answer_and_a_part_of_the_prompts() -> None:
    engine = PacedEngine(Switches())
    sequences = [Running(100, 2) for _ in range(REQUESTS + 4)]
    engine._waiting.extend(sequences)
    engine._admit()
    assert (len(engine._running), len(engine._waiting)) == (REQUESTS, 4)
    assert engine._compute() == BUDGET
    engine._tell(1.0)
    whole = BUDGET // 100
    assert [each.generated for each in sequences[: whole + 1]] == [1] * whole + [0]
    # Their last tokens, and the next prompts.
    assert engine._compute() == BUDGET + whole
    engine._tell(2.0)
    assert len(engine._running) == REQUESTS - whole
    assert [sequences[0].chunks.get_nowait() for _ in range(2)] == [False, True]


async def test_who_has_left_is_not_computed() -> None:
    engine = PacedEngine(Switches())
    sequence = Running(10, 5, has_left=True)
    engine._waiting.append(sequence)
    engine._admit()
    assert engine._compute() == 0
    assert not engine._running
