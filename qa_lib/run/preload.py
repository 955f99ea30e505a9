"""What a warm process has imported (see warm.py), and whether that has touched the GPU."""

import contextlib
import ctypes

import ipykernel.kernelapp  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import papermill.cli  # noqa: F401
import seaborn  # noqa: F401

import qa_lib.run.fit  # noqa: F401

NOT_INITIALIZED = 3  # CUresult


def cuda_initialized() -> bool:
    """Whether this process has initialized CUDA's driver, after which no process forked from it can use a GPU."""
    with contextlib.suppress(OSError):  # there is no driver
        return ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != NOT_INITIALIZED
    return False


TOUCHED = cuda_initialized()
