"""What a warm process has imported (see warm.py), and whether that has touched the GPU."""

import contextlib
import ctypes
import signal

# Ctrl-C is the sweep's to tell, not an import's.
_ordinary = signal.signal(signal.SIGINT, signal.SIG_IGN)

import ipykernel.kernelapp  # noqa: E402, F401
import matplotlib.pyplot  # noqa: E402, F401
import papermill.cli  # noqa: E402, F401
import seaborn  # noqa: E402, F401

import qa_lib.run.fit  # noqa: E402, F401

signal.signal(signal.SIGINT, _ordinary)

NOT_INITIALIZED = 3  # CUresult


def _is_cuda_initialized() -> bool:
    """Return whether CUDA's driver is initialized in this process."""
    with contextlib.suppress(OSError):  # there is no driver
        driver = ctypes.CDLL("libcuda.so.1")
        return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != NOT_INITIALIZED
    return False


# After CUDA's driver is initialized, no process forked from this one can use a GPU.
TOUCHED = _is_cuda_initialized()
