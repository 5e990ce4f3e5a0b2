"""The collector of reference cycles runs seldom, and still frees cycles."""

import subprocess
import sys

SCRIPT = """
import gc, sys, weakref
from tandem_contract.memory import YOUNG, collect_seldom

class Node:
    pass

def cycle():
    node = Node()
    node.itself = node
    return node

if sys.argv[1] == "seldom":
    collect_seldom()
def searches():
    return sum(generation["collections"] for generation in gc.get_stats())
before = searches()
kept = [Node() for _ in range(YOUNG // 4)]
searched = searches() - before
first = weakref.ref(cycle())
while first() is not None:
    kept.append(Node())
    assert len(kept) < 3 * YOUNG, "the cycle is still there"
print(searched)
"""


def searches(mode: str) -> int:
    command = [sys.executable, "-c", SCRIPT, mode]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_few_objects_cause_no_search_and_cycles_are_freed() -> None:
    assert searches("default") > 0
    assert searches("seldom") == 0
