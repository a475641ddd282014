"""Facts: which calls block, on this GPU and driver, while a stream waits for a word of host memory?

A stream waits, behind copies that are still running. The main thread makes a call that programs make (`CALLS`). A
thread, as one of communication, makes one CUDA call of its own (`PROGRESS`), and then writes the word. If neither
returned, that would be the deadlock that docs/cuda.md describes; so the word is written after `RESCUE_S` at the latest,
and the thread's time is longer then. With "none" the thread needs no driver, as the engine.
"""

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from commlayer.frontend.device.accelerator import current, write_word

BUSY_S = 0.4
RESCUE_S = 2.0
CYCLES_PER_SECOND = 1.5e9
ELEMENTS = 1 << 22


def _launch(values: Tensor, count: int) -> None:
    for _ in range(count):
        values[:1].add_(1)


CALLS: dict[str, Callable[[Tensor], object]] = {
    "none": lambda _: None,
    "first use of a kernel": torch.special.bessel_j0,
    "cpu": lambda values: values.cpu(),
    "item": lambda values: values[0].item(),
    "malloc": lambda values: torch.empty(1 << 28, dtype=torch.uint8, device=values.device),
    "empty_cache": lambda _: torch.cuda.empty_cache(),
    "pin": lambda _: torch.empty(96 << 20, dtype=torch.uint8, pin_memory=True),
    "streams": lambda _: [torch.cuda.Stream(priority=-1) for _ in range(40)],
    "5000 kernels": lambda values: _launch(values, 5000),
    "3000 events": lambda _: [torch.cuda.Event().record() for _ in range(3000)],
    "synchronize": lambda _: torch.cuda.synchronize(),
}

PROGRESS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "none": lambda *_: time.sleep(3 * BUSY_S),
    "kernel": lambda values, _: values[:1].add_(1),
    "copy": lambda values, host: host.copy_(values, non_blocking=True),
    "malloc": lambda values, _: torch.empty(1 << 27, dtype=torch.uint8, device=values.device),
}
"""Calls of the thread, on a stream of its own. "event.synchronize" waits for the copies instead."""
WAITS = "event.synchronize"


def fact(call: str, progress: str) -> dict[str, float]:
    """Seconds from the wait until the call returned, and until the thread wrote the word."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    accelerator = current()
    waiting, out, other = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    values, host = torch.ones(ELEMENTS, device=device), torch.empty(ELEMENTS, pin_memory=True)
    mine, its = torch.ones(ELEMENTS, device=device), torch.empty(ELEMENTS, pin_memory=True)
    word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    spare = [torch.empty(64 << 20, dtype=torch.uint8, device=device) for _ in range(4)]
    for stream in (waiting, out):  # the case's own kernels are loaded
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1000)
            host.copy_(values, non_blocking=True)
            values.add_(1)
    torch.cuda.synchronize()
    spare.clear()  # cached blocks, which empty_cache frees
    ready = torch.cuda.Event(blocking=True)
    with torch.cuda.stream(out):
        torch.cuda._sleep(int(BUSY_S * CYCLES_PER_SECOND))
        host.copy_(values, non_blocking=True)
        ready.record(out)
    begun_s = time.monotonic()
    times: dict[str, float] = {}
    waiting.wait_event(ready)
    accelerator.wait_word(waiting, word)

    def progresses() -> None:
        torch.cuda.set_device(device)
        time.sleep(0.05)  # the main thread is in its call
        if progress == WAITS:
            ready.synchronize()
        else:
            with torch.cuda.stream(other):
                PROGRESS[progress](mine, its)
        times["progress_s"] = round(time.monotonic() - begun_s, 2)
        write_word(word)

    thread, rescue = threading.Thread(target=progresses), threading.Timer(RESCUE_S, write_word, (word,))
    rescue.start()
    thread.start()
    CALLS[call](values)
    times["call_s"] = round(time.monotonic() - begun_s, 2)
    thread.join()
    rescue.cancel()
    torch.cuda.synchronize()
    return times
