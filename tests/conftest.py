from collections.abc import Iterator

import pytest

from tests.world import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """The ranks that all tests share."""
    ranks = World()
    yield ranks
    ranks.close()
