"""The predicted costs of a decision as text."""

from tandem_cli.cost_lines import SHOWN, cost_lines, first_token
from tandem_contract.trace import CostTrace, DecisionTrace


def test_the_cheapest_and_the_chosen_of_each_part_are_shown() -> None:
    costs = [CostTrace(f"p-{i}", "prefill", float(i), {"wait": float(i)}) for i in range(5)]
    costs.append(CostTrace("p-9", "prefill", 9.0, {"wait": 9.0}, chosen=True))
    costs.append(CostTrace("d-0", "decode", 0.012, {"handoff": 0.012}, fabric="same_node"))
    assert list(cost_lines(costs)) == [
        "  prefill  p-0: cost 0.0 ms = wait 0.0 ms",
        "  prefill  p-1: cost 1.00 s = wait 1.00 s",
        "  prefill  p-2: cost 2.00 s = wait 2.00 s",
        "  prefill  p-9: chosen, cost 9.00 s = wait 9.00 s",
        "  prefill  2 more cost more; --json prints them",
        "  decode   d-0: cost 12.0 ms = handoff 12.0 ms, prefill on the same node",
    ]
    assert len(list(cost_lines(costs[:SHOWN]))) == SHOWN


def test_the_first_token_beside_its_prediction() -> None:
    def text(predicted: float | None, measured: float | None) -> str:
        trace = DecisionTrace("r", 1.0, 0.1, predicted_ttft=predicted, measured_ttft=measured)
        return first_token(trace)

    assert text(None, None) == ""
    assert text(0.5, None) == "predicted  first token after 500.0 ms"
    assert text(None, 0.5) == "first token after 500.0 ms"
    assert text(0.5, 1.0) == "first token after 1.00 s; predicted 500.0 ms (50% too low)"
    learned = DecisionTrace("r", 1.0, 0.1, predicted_ttft=0.75, measured_ttft=0.5, overhead=0.02)
    assert first_token(learned).endswith(
        "predicted 750.0 ms with 20.0 ms of overhead (50% too high)"
    )
