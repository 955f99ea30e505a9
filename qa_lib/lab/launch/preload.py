"""What a warm process has imported (see warm.py), and whether that has touched the GPU."""

import contextlib
import ctypes
import importlib
import signal

ordinary = signal.signal(
    signal.SIGINT, signal.SIG_IGN
)  # Ctrl-C is the sweep's to tell, not an import's
for name in (
    "ipykernel.kernelapp",
    "matplotlib.pyplot",
    "papermill.cli",
    "seaborn",
    "qa_lib.run.fit",
):
    importlib.import_module(name)
signal.signal(signal.SIGINT, ordinary)

NOT_INITIALIZED = 3  # CUresult
TOUCHED = False  # whether CUDA's driver is initialized, after which no process forked from this one can use a GPU
with contextlib.suppress(OSError):  # there is no driver
    TOUCHED = (
        ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
        != NOT_INITIALIZED
    )
