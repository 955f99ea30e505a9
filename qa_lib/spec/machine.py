"""What decides whether, and how, a variant can run on a machine. Standard library only."""

import re
from dataclasses import dataclass

# Compute capability x 10 of a V100 and of an A100; a T4 has 75, an L4 89, an H100 90.
VOLTA = 70
AMPERE = 80
# A process takes this of a GPU's memory beside what PyTorch reserves.
CONTEXT_GIB = 0.5


@dataclass(frozen=True)
class Machine:
    """A machine as rules see it; `measure/hardware.py` looks at the real one."""

    hardware: str = "cpu"
    """Name of its GPU as `hardware_name` makes it: the first half of a group's name."""
    gpus: int = 0
    unlike: str = ""
    """The names of its GPUs, where they are not all of one kind."""
    linked: bool = False
    """Whether each of its GPUs writes into the memory of all others over NVLink."""
    sm: int = 0
    """Compute capability x 10 of its GPUs; 0 without a GPU."""
    free_mib: int = 0
    """Free memory of the first GPU; 0 where that is not known."""
    total_mib: int = 0
    """All memory of the first GPU; 0 where that is not known."""
    bitsandbytes: bool = False
    """Whether this package is installed, as are the next three."""
    deepspeed: bool = False
    peft: bool = False
    torchao: bool = False
    adapters_fault: str = ""
    """Why peft cannot be used although it is installed (`packages.adapters_fault`)."""
    compiler: bool = False
    """Whether Inductor can generate code: by a C++ compiler, or by Triton with a GPU."""


def gpu_of(sm: int) -> Machine:
    """Return a machine with one GPU of compute capability `sm` / 10 and everything installed.

    It stands for the GPU in plans that are made on a machine without one.
    """
    return Machine(
        hardware="gpu",
        gpus=1,
        sm=sm,
        bitsandbytes=True,
        deepspeed=True,
        peft=True,
        torchao=True,
        compiler=True,
    )


def hardware_name(gpu: str | None) -> str:
    """Return a GPU's marketing name as part of a folder's name.

    'NVIDIA H200' gives 'h200', and no GPU 'cpu'.
    """
    if not gpu:
        return "cpu"
    model = re.sub(r"NVIDIA|Tesla|GeForce", "", gpu).strip().lower()
    return re.sub(r"[^a-z0-9]+", "-", model).strip("-")
