"""The fixture that a user's own tests get."""

from __future__ import annotations

import pytest

import arpc
from arpc.agent.scope import current_scope

pytest_plugins = ["pytester"]

TESTS_OF_A_USER = """
    import arpc

    def double(value):
        return 2 * value

    async def test_with_workers(arpc_cluster):
        async with arpc_cluster(2) as group:
            assert await group[0].rpc_sync("worker1", double, args=(21,)) == 42
            assert await arpc.rpc_sync("worker1", double, args=(4,)) == 8

    async def test_several_groups(arpc_cluster):
        for size in (1, 3):
            async with arpc_cluster(size) as group:
                assert len(group) == size
"""

A_FIXTURE_WHOSE_END_FAILS = """
    import arpc
    import pytest

    @pytest.fixture
    async def group(arpc_cluster):
        async with arpc_cluster(2) as group:
            yield group
            raise ZeroDivisionError

    async def test_with_workers(group):
        assert arpc.get_worker_info().name == "worker0"
        assert len(group) == 2

    def test_that_follows():
        with pytest.raises(arpc.NotInitializedError):
            arpc.get_worker_info()
"""


@pytest.fixture(autouse=True)
def settings_of_a_user(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")


def test_the_fixture_in_the_tests_of_a_user(pytester: pytest.Pytester):
    pytester.makepyfile(TESTS_OF_A_USER)
    result = pytester.runpytest_inprocess("-q")
    result.assert_outcomes(passed=2)


def test_an_end_that_fails_leaves_no_worker_to_the_next_test(pytester: pytest.Pytester):
    pytester.makepyfile(A_FIXTURE_WHOSE_END_FAILS)
    result = pytester.runpytest_inprocess("-q")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_with_workers*", "*ZeroDivisionError*"])
    assert current_scope.get() is None


def test_the_fixture_tells_what_it_is_for(pytester: pytest.Pytester):
    result = pytester.runpytest_inprocess("--fixtures", "-q")
    result.stdout.fnmatch_lines(["arpc_cluster*", "*group*of workers*"])


async def test_the_fixture_here(arpc_cluster):
    async with arpc_cluster(["one", "two"]) as group:
        info = await group["one"].rpc_sync("two", arpc.get_worker_info)
        assert info == arpc.WorkerInfo("two", 1)
