"""The table of plans that were used: its size, and what workers share."""

import os

from tandem_sidecar.security.route import _BUCKETS, UsedPlans

NOW = 1_800_000_000.0


def plan(number: int) -> str:
    return f"v1.key.payload.{number:022x}"


def test_a_plan_is_used_once_until_it_expires() -> None:
    used = UsedPlans()
    assert used.use(plan(1), NOW + 120, NOW)
    assert not used.use(plan(1), NOW + 120, NOW)
    assert not used.use(plan(1), NOW + 120, NOW + 120)
    assert used.use(plan(2), NOW + 120, NOW)
    assert used.use(plan(1), NOW + 400, NOW + 300)


def test_expired_plans_make_room() -> None:
    used = UsedPlans()
    for minute in range(4):
        now = NOW + 300 * minute
        plans = [plan(minute * _BUCKETS + n) for n in range(_BUCKETS)]
        assert all(used.use(each, now + 120, now) for each in plans)
        repeated = sum(not used.use(each, now + 120, now) for each in plans)
        # With one for each bucket on average, 4 places are too few for 1 in 250.
        assert repeated > 0.98 * len(plans)


def test_a_full_table_forgets_the_plan_that_expires_first() -> None:
    used = UsedPlans()
    for n in range(8 * _BUCKETS):
        assert used.use(plan(n), NOW + 100 + n * 1e-4, NOW)
    latest = [plan(n) for n in range(8 * _BUCKETS - 1000, 8 * _BUCKETS)]
    assert sum(used.use(each, NOW + 200, NOW) for each in latest) < 100


def test_workers_share_a_table() -> None:
    descriptor = UsedPlans.create()
    first, second = (UsedPlans(descriptor) for _ in range(2))
    os.close(descriptor)
    assert first.use(plan(1), NOW + 120, NOW)
    assert not second.use(plan(1), NOW + 120, NOW)


def test_an_end_that_no_record_holds_is_used_once() -> None:
    """An EPP whose clock is centuries ahead signs such plans; fuzzing found one."""
    used = UsedPlans()
    assert used.use("a" * 40, 8.1e9, 0.0)
    assert not used.use("a" * 40, 8.1e9, 1.0)
