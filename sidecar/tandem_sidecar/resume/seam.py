"""Where another engine begins to generate.

    seam = Seam(stops, included=False)
    seam.add(count, text, is_boundary=True)     text and tokens that were delivered
    seam.start                                  the tokens that belong to the next engine's prompt
    seam.text                                   what the client has of the answer after them

An engine that is given tokens which end within a character writes wrong text, vLLM even its whole
prompt. So it is given those up to a boundary between characters, and generates the others again.
The text that an event of one token brings ends at such a boundary. One of several tokens, in which
vLLM joins what a slow reader has not fetched, may end with the beginning of a character.

Stop strings begin in text that was generated before them. The next engine finds them in what it
generates itself, so its text begins early enough: by the length of the longest stop string less 1
before the end of the text of all tokens that were delivered. As many characters, or none if the
stop string is included in the answer, are held back by an engine, which tells their tokens already.
"""

from collections.abc import Sequence


class Seam:
    """The last place in a stream from which another engine can generate it again."""

    def __init__(self, stops: Sequence[str] = (), *, included: bool = False) -> None:
        """`stops`: the stop strings; `included`: they are part of the answer."""
        self.start = 0
        """How many of the answer's tokens come before it."""
        self.text = ""
        """The text that was delivered after it, which the next engine generates again."""
        self._overlap = max(map(len, stops), default=1) - 1
        self._held_back = 0 if included else self._overlap
        self._later: list[tuple[int, int]] = []
        """Boundaries that stop strings do not allow yet: tokens, and the place in `text` where the
        text of those after them begins."""

    @property
    def is_last_boundary(self) -> bool:
        """Whether the next engine can begin at every boundary, because no stop string forbids."""
        return self._overlap == 0

    def move(self, count: int) -> None:
        """Begin after `count` tokens, which have all of their text."""
        self.start, self.text = count, ""

    def add(self, count: int, text: str, *, is_boundary: bool) -> None:
        """Note that `text` was delivered, and with it `count` tokens since the stream's start.
        `is_boundary`: the last of them ends a character."""
        self.text += text
        if is_boundary:
            self._later.append((count, len(self.text) + self._held_back))
        latest = len(self.text) + self._held_back - self._overlap
        passed = sum(place <= latest for _, place in self._later)
        if passed:
            self.start, begin = self._later[passed - 1]
            self.text = self.text[begin:]
            self._later = [(number, place - begin) for number, place in self._later[passed:]]
