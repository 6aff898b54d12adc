"""Fixtures shared by all tests."""

from collections.abc import Iterator

import pytest

from tests import dist


@pytest.fixture(scope="session", autouse=True)
def _end_workers() -> Iterator[None]:
    yield
    dist.close_shared_pool()


@pytest.fixture(scope="module")
def interpreters() -> Iterator[dist.Pool]:
    """Processes in which Triton interprets, which it decides at its import; one module's own."""
    pool = dist.Pool(TRITON_INTERPRET="1")
    yield pool
    pool.close()


@pytest.fixture
def pool() -> dist.Pool:
    """Processes that live for the whole session: ``pool.run(fn, world, *args, timeout=120)``."""
    return dist.shared_pool()
