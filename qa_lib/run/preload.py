"""What a warm process has imported (see warm.py), and whether that has touched the GPU."""

import contextlib
import ctypes

import ipykernel.kernelapp  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import papermill.cli  # noqa: F401
import seaborn  # noqa: F401

import qa_lib.run.fit  # noqa: F401

NOT_INITIALIZED = 3  # CUresult
TOUCHED = False  # whether CUDA's driver is initialized, after which no process forked from this one can use a GPU
with contextlib.suppress(OSError):  # there is no driver
    TOUCHED = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != NOT_INITIALIZED
