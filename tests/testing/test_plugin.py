"""The fixture that a user's own tests get."""

from __future__ import annotations

import pytest

import arpc

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


@pytest.fixture(autouse=True)
def settings_of_a_user(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")


def test_the_fixture_in_the_tests_of_a_user(pytester: pytest.Pytester):
    pytester.makepyfile(TESTS_OF_A_USER)
    result = pytester.runpytest_inprocess("-q")
    result.assert_outcomes(passed=2)


def test_the_fixture_tells_what_it_is_for(pytester: pytest.Pytester):
    result = pytester.runpytest_inprocess("--fixtures", "-q")
    result.stdout.fnmatch_lines(["arpc_cluster*", "*group*of workers*"])


async def test_the_fixture_here(arpc_cluster):
    async with arpc_cluster(["one", "two"]) as group:
        info = await group["one"].rpc_sync("two", arpc.get_worker_info)
        assert info == arpc.WorkerInfo("two", 1)
