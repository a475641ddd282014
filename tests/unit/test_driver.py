"""The bindings of libcuda, on a library in C that notes the arguments of its calls."""

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

from commlayer.frontend.device.driver import Driver, DriverError

STUB = """
#include <stdint.h>
typedef struct CUstream_st *CUstream;
uint64_t noted[6];
int result = 0;

int cuMemHostGetDevicePointer_v2(uint64_t *device, void *host, unsigned int flags)
{
    noted[0] = (uint64_t)(uintptr_t)host;
    noted[1] = flags;
    *device = 0xfedcba9876543210u;
    return result == 1 ? 1 : 0;
}

int cuGetErrorName(int error, const char **name)
{
    *name = error == 801 ? "CUDA_ERROR_NOT_SUPPORTED" : 0;
    return error == 801 ? 0 : 1;
}
"""

WRITE = """
int cuStreamWriteValue32_v2(CUstream stream, uint64_t address, uint32_t value, unsigned int flags)
{
    noted[2] = (uint64_t)(uintptr_t)stream;
    noted[3] = address;
    noted[4] = value;
    noted[5] = flags;
    return 0;
}
"""

WAIT = """
int cuStreamWaitValue32_v2(CUstream stream, uint64_t address, uint32_t value, unsigned int flags)
{
    noted[2] = (uint64_t)(uintptr_t)stream;
    noted[3] = address;
    noted[4] = value;
    noted[5] = flags;
    return result;
}
"""


def build(folder: Path, source: str) -> str:
    (folder / "stub.c").write_text(source, encoding="utf-8")
    library = folder / "libstub.so"
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", library, folder / "stub.c"], check=True)
    return str(library)


def test_calls_have_the_arguments_of_cuda(tmp_path: Path) -> None:
    library = build(tmp_path, STUB + WAIT + WRITE)
    driver = Driver(library)
    stub = ctypes.CDLL(library)
    noted = (ctypes.c_uint64 * 6).in_dll(stub, "noted")
    driver.wait_value(0xFFFF_8123_4567_89AB, 0x7FFF_1234_5678, 1)
    assert list(noted) == [0x7FFF_1234_5678, 0, 0xFFFF_8123_4567_89AB, 0xFEDC_BA98_7654_3210, 1, 0]
    driver.wait_value(0, 8, 1)  # the default stream
    assert noted[2] == 0
    driver.write_value(0xFFFF_8123_4567_89AB, 0x7FFF_1234_5679, 1)
    assert list(noted) == [0x7FFF_1234_5679, 0, 0xFFFF_8123_4567_89AB, 0xFEDC_BA98_7654_3210, 1, 0]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (801, r"cuStreamWaitValue32: CUDA_ERROR_NOT_SUPPORTED \(801\)"),
        (1, r"cuMemHostGetDevicePointer: unknown error \(1\)"),
    ],
)
def test_an_error_has_its_name(tmp_path: Path, result: int, text: str) -> None:
    library = build(tmp_path, STUB + WAIT + WRITE)
    ctypes.c_int.in_dll(ctypes.CDLL(library), "result").value = result
    with pytest.raises(DriverError, match=text):
        Driver(library).wait_value(1, 2, 1)


def test_a_driver_without_the_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DriverError, match=r"has no cuStreamWaitValue32_v2; install a driver of CUDA 11\.7"):
        Driver(build(tmp_path, STUB))


def test_a_driver_of_cuda_11_4_is_refused(tmp_path: Path) -> None:
    """It has these functions by their former names, for which a process had to be started with a parameter."""
    former = (WAIT + WRITE).replace("Value32_v2", "Value32")
    with pytest.raises(DriverError, match=r"has no cuStreamWaitValue32_v2; install a driver of CUDA 11\.7 or later"):
        Driver(build(tmp_path, STUB + former))


def test_a_machine_without_a_driver_is_refused() -> None:
    with pytest.raises(DriverError, match=r"libnone\.so\.1: .*; install the driver of NVIDIA"):
        Driver("libnone.so.1")
