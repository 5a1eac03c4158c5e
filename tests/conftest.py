from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.world import World

# Nothing that hypothesis draws may fail because the machine is busy, and every run draws the same.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """The ranks that all tests share."""
    ranks = World()
    yield ranks
    ranks.close()
