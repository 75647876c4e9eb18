"""Word wrap for text that arrives in pieces, for a terminal only. Pure: text in, what to write out.

A word is shown as far as it has come. Where it then turns out to be too long for the line, what is on the screen of it
is erased and the word begins the next line: nothing is held back, and a terminal never splits a word itself. Blanks and
line ends of the text stay as they are, so that code keeps its indentation.
"""

from __future__ import annotations

import unicodedata

from rich.cells import cell_len

TAB = 4


class WordWrap:
    """`feed` gives the same screen however the text is cut."""

    def __init__(self) -> None:
        self.column = 0
        self._word = ""
        """The word at the cursor, as far as it is on the screen."""

    def feed(self, text: str, width: int) -> str:
        """What to write to a terminal of `width` cells. The last cell stays free: from there terminals differ in how a
        cursor steps back."""
        return "".join(self._take(char, max(1, width - 1)) for char in text)

    def restart(self) -> None:
        """The cursor was put at the beginning of a line by somebody else."""
        self.column, self._word = 0, ""

    def _take(self, char: str, limit: int) -> str:
        if char == "\n":
            self.restart()
            return "\n"
        if char in " \t":
            return self._blank(" " * (1 if char == " " else TAB - self.column % TAB), limit)
        if unicodedata.category(char) == "Cc":
            return ""  # would move the cursor, or worse
        return self._letter(char, limit)

    def _blank(self, blanks: str, limit: int) -> str:
        self._word = ""
        if self.column + len(blanks) > limit:  # the line ends here: the blank is the line end
            self.restart()
            return "\n"
        self.column += len(blanks)
        return blanks

    def _letter(self, char: str, limit: int) -> str:
        cells = cell_len(char)
        if cells > 1:  # scripts in wide characters have no blanks: a line may end before and after each
            self._word = ""
        written = char
        if self.column + cells > limit:
            written = self._broken(limit) + char
        self.column += cells
        self._word = "" if cells > 1 else self._word + char
        return written

    def _broken(self, limit: int) -> str:
        """Go to the next line, taking the word along where that helps."""
        word, cells = self._word, cell_len(self._word)
        if not word or cells >= self.column or cells >= limit:
            self.restart()
            return "\n"
        self.column = cells
        return f"\x1b[{cells}D\x1b[K\n{word}"
