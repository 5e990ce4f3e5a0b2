import time

from tandem_loadtest.run.self_watch import PERIOD, SelfWatch
from tandem_loadtest.run.timers import Timers


async def test_a_blocked_loop_is_seen_as_read_lag_and_work_as_cpu_share() -> None:
    with Timers() as timers:
        watch = SelfWatch(timers)
        watch.start()
        # A measurement is due during this time, and the loop cannot serve it.
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            pass
        await timers.sleep_until(timers.now() + PERIOD)
        cpu_share = watch.stop()
        count = watch.read_lag.count
        # A measurement that is under way when the watch ends is dropped.
        await timers.sleep_until(timers.now() + 3 * PERIOD)
    assert watch.read_lag.maximum > 0.1 - 2 * PERIOD
    assert watch.read_lag.count == count
    assert cpu_share > 0
