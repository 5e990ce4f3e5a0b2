import asyncio
from collections import Counter
from collections.abc import Callable

from tandem_loadtest.calls import Answer, Call, Result
from tandem_loadtest.records import Outcome
from tandem_loadtest.run.protocol import Verdict
from tandem_loadtest.run.reference_check import AGAIN, WIDTH, Answered, check_answers


class FakeReference:
    """A reference whose answer depends on the question and on the requests in flight."""

    def __init__(self, answer: Callable[[str, int], str | None]) -> None:
        self._answer = answer
        self.asked: Counter[str] = Counter()
        self.in_flight = 0
        self.peak = 0

    async def send(self, call: Call) -> Result:
        prompt = str(call.prompt)
        self.asked[prompt] += 1
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        # All of a batch arrive before the first is answered.
        await asyncio.sleep(0)
        text = self._answer(prompt, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        if text is None:
            return Result(call, error="HTTP 500: broken", outcome=Outcome.ERROR_STATUS)
        return Result(call, answer=Answer(text=text))


def answers(**texts: str) -> list[Answered]:
    """What the target answered, by prompt."""
    return [
        Answered(index, 0, Call(prompt, max_tokens=1), Answer(text=text))
        for index, (prompt, text) in enumerate(texts.items())
    ]


async def check(reference: FakeReference, answered: list[Answered], load: int) -> list[Verdict]:
    """The verdicts, in the order of the answers."""
    verdicts: list[Verdict] = []
    await check_answers(reference.send, answered, load, verdicts.append)
    return sorted(verdicts, key=lambda verdict: verdict.index)


async def test_equal_answers_need_one_question_each_a_few_at_a_time() -> None:
    reference = FakeReference(lambda prompt, _: prompt.upper())
    texts = {f"q{number}": f"Q{number}" for number in range(3 * WIDTH)}
    verdicts = await check(reference, answers(**texts), load=50)
    assert verdicts == [
        Verdict(index=index, turn=0, outcome=Outcome.OK, error="") for index in range(len(texts))
    ]
    assert reference.asked == dict.fromkeys(texts, 1)
    assert reference.peak == WIDTH


async def test_another_answer_than_that_of_a_repeatable_reference_is_wrong() -> None:
    reference = FakeReference(lambda prompt, _: prompt.upper())
    right, wrong = await check(reference, answers(a="A", b="x"), load=6)
    assert (right.outcome, wrong.outcome) == (Outcome.OK, Outcome.WRONG)
    assert "x" not in wrong.error.split()
    # Once, once alone, and under load, where other questions keep up the load.
    assert reference.asked["b"] >= 2 + AGAIN
    assert reference.peak == 6


async def test_another_answer_than_that_of_a_reference_that_changes_under_load_differs() -> None:
    reference = FakeReference(lambda prompt, load: prompt.upper() if load <= 2 else "other")
    verdicts = await check(reference, answers(a="A", b="x"), load=4)
    assert [v.outcome for v in verdicts] == [Outcome.OK, Outcome.DIFFERS]
    assert verdicts[1].error.endswith("but the reference does not repeat itself")


async def test_a_reference_that_changes_without_load_differs_too() -> None:
    reference = FakeReference(lambda prompt, _: f"{prompt} {reference.asked[prompt]}")
    verdicts = await check(reference, answers(a="A"), load=1)
    assert [v.outcome for v in verdicts] == [Outcome.DIFFERS]
    # The second answer decides.
    assert reference.asked == {"a": 2}


async def test_the_reference_decides_alone_if_the_first_questions_disturb_each_other() -> None:
    reference = FakeReference(lambda prompt, load: prompt.upper() if load == 1 else "other")
    verdicts = await check(reference, answers(a="A", b="B"), load=2)
    assert [v.outcome for v in verdicts] == [Outcome.OK, Outcome.OK]


async def test_answers_that_the_reference_cannot_give_stay_as_they_are() -> None:
    reference = FakeReference(lambda prompt, _: None if prompt == "a" else prompt.upper())
    failed, right = await check(reference, answers(a="A", b="B"), load=2)
    assert (failed.outcome, failed.error) == (None, "HTTP 500: broken")
    assert right.outcome is Outcome.OK
