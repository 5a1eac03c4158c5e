"""Each planted bug names a line that stands once in its file. `python -m tests.planted_bugs` plants them."""

from __future__ import annotations

import pytest

from tests.planted_bugs import BUGS, ROOT, Bug


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_line_stands_once_in_its_file(bug: Bug) -> None:
    assert (ROOT / bug.file).read_text().count(bug.line) == 1
    assert bug.wrong != bug.line
