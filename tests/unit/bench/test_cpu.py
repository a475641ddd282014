import os

from commlayer.tools.bench.cpu import CpuTime, parse_proc_stat

TICKS = os.sysconf("SC_CLK_TCK")


def test_busy_time_leaves_out_idle_waiting_and_stolen_time() -> None:
    text = "cpu  100 20 300 5000 600 7 80 9000 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n"
    assert parse_proc_stat(text) == ((100 + 20 + 300 + 7 + 80) / TICKS, (7 + 80) / TICKS)


def test_work_of_this_process_is_charged() -> None:
    before = CpuTime.now()
    while (CpuTime.now() - before).process_s < 0.05:
        pass
    spent = CpuTime.now() - before
    assert spent.process_s >= 0.05
    assert spent.machine_s >= 0.0


def test_difference_is_by_field() -> None:
    assert CpuTime(5.0, 7.0, 9.0) - CpuTime(1.0, 2.0, 3.0) == CpuTime(4.0, 5.0, 6.0)
