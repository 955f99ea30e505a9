"""The slow imports of a run, which the fork server of warm.py makes once for all processes.

Importing this module is its purpose. `TOUCHED` tells whether an import has initialized CUDA.
"""

import contextlib
import ctypes
import gc
import importlib
import signal

# Ctrl-C reaches all processes of a terminal. The sweep reports it; the imports here ignore it.
_handler_before = signal.signal(signal.SIGINT, signal.SIG_IGN)

# For a notebook and its kernel. They are of an extra, and runs without a notebook do without.
for name in ("ipykernel.kernelapp", "matplotlib.pyplot", "papermill.cli", "seaborn"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

# For the run itself: PyTorch, transformers and the library.
import qa_lib.run.fit  # noqa: E402, F401

signal.signal(signal.SIGINT, _handler_before)

# What was imported stays. A process that is forked from this one would take half a second to look
# for garbage among it, and more memory, since it would write into each page of it.
gc.freeze()

CUDA_ERROR_NOT_INITIALIZED = 3  # a CUresult of CUDA's driver


def _is_cuda_initialized() -> bool:
    """Return whether CUDA's driver is initialized in this process."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # there is no driver
        return False
    # A call that changes nothing, for its status.
    count = ctypes.c_int()
    status = driver.cuDeviceGetCount(ctypes.byref(count))
    return status != CUDA_ERROR_NOT_INITIALIZED


# After CUDA's driver is initialized, no process forked from this one can use a GPU.
TOUCHED = _is_cuda_initialized()
