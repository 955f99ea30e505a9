"""A call with fake tensors compiles a kernel, once for each kind of arguments.

A call that starts the kernel waits until it is compiled.
"""

import threading
from unittest.mock import MagicMock

import pytest
import torch
from torch import library
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from qa_lib.kernels import common, precompile
from tests.material import python


def started(kernel: MagicMock) -> list[tuple]:
    """Return the grid and the arguments of each time that a kernel was started."""
    grids = [call.args[0] for call in kernel.__getitem__.call_args_list]
    calls = kernel[...].call_args_list
    return [(grid, call.args, call.kwargs) for grid, call in zip(grids, calls, strict=True)]


@pytest.fixture
def compiled(monkeypatch):
    """What has been compiled, and the gate that compiling waits for."""
    done = []
    gate = threading.Event()

    def compile_later(kernel, likes, device):
        assert gate.wait(10)
        done.append((likes, device.type))
        return MagicMock()

    monkeypatch.setattr(precompile, "_compile", compile_later)
    monkeypatch.setattr(precompile, "_asked_for", set())
    monkeypatch.setattr(precompile, "_unloaded", [])
    yield done, gate
    gate.set()


def test_fake_tensors_start_nothing_and_have_each_kind_compiled_once(compiled):
    done, gate = compiled
    kernel = MagicMock()
    with FakeTensorMode():
        for rows in (3, 3, 5):
            x = torch.empty(rows, device="cuda")
            precompile.launch(kernel, (1,), x=(x, x.half()), y=None, rows=rows, BLOCK=8)
        on_cpu = (torch.empty(3), torch.empty(3))
        precompile.launch(kernel, (1,), x=on_cpu, y=None, rows=3, BLOCK=8)
    precompile.launch(kernel, (1,), x=torch.empty(3, device="meta"), rows=3)
    gate.set()
    precompile.wait(precompile._unloaded)
    types = (torch.float32, torch.float16)
    assert sorted(done, key=str) == [
        ({"x": types, "y": None, "rows": rows, "BLOCK": 8}, "cuda") for rows in (3, 5)
    ]
    assert not started(kernel)


def test_what_is_started_waits_for_what_is_being_compiled(compiled):
    done, gate = compiled
    kernel = MagicMock()
    x = torch.ones(2)
    with FakeTensorMode():
        precompile.launch(kernel, (1,), x=torch.empty(2, device="cuda"))
    threading.Timer(0.1, gate.set).start()
    precompile.launch(kernel, (7,), x=x, BLOCK=8)
    assert len(done) == 1
    assert started(kernel) == [((7,), (), {"x": x, "BLOCK": 8})]


class Program:
    """A compiled kernel that notes which thread loads it."""

    def __init__(self, loaded_by: list):
        self.loaded_by = loaded_by

    @property
    def run(self):
        self.loaded_by.append(threading.current_thread())


def test_programs_are_loaded_one_after_the_other_by_the_thread_that_launches(monkeypatch):
    """Launchers of Triton 3.6 that two threads load at once take each other's function."""
    loaded_by = []
    monkeypatch.setattr(precompile, "_compile", lambda *_: Program(loaded_by))
    monkeypatch.setattr(precompile, "_asked_for", set())
    monkeypatch.setattr(precompile, "_unloaded", [])
    kernel = MagicMock()
    with FakeTensorMode():
        for rows in (1, 2, 3):
            precompile.launch(kernel, (1,), x=torch.empty(rows, device="cuda"), rows=rows)
    precompile.wait(precompile._unloaded)
    assert loaded_by == []
    for _ in range(2):
        precompile.launch(kernel, (1,), x=torch.ones(2))
    assert loaded_by == 3 * [threading.current_thread()]


def test_a_compilation_that_fails_is_left_to_the_launch(monkeypatch):
    def fail(*_):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(precompile, "_compile", fail)
    monkeypatch.setattr(precompile, "_asked_for", set())
    monkeypatch.setattr(precompile, "_unloaded", [])
    kernel = MagicMock()
    with FakeTensorMode():
        precompile.launch(kernel, (1,), x=torch.empty(2, device="cuda"))
    precompile.launch(kernel, (1,), x=torch.ones(2))
    assert len(started(kernel)) == 1


def test_an_operator_tells_shapes_by_what_it_does():
    @common.custom_op("qa_lib_tests::doubled")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, torch._subclasses.FakeTensor):
            return x.new_empty(2 * len(x))
        return torch.cat([x, x])

    library.opcheck(
        doubled.operator, (torch.ones(3),), test_utils=("test_schema", "test_faketensor")
    )
    compiled_doubled = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    assert compiled_doubled(torch.ones(3)).tolist() == [1.0] * 6


class Seen(TorchDispatchMode):
    """Keeps the names of all operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **kwargs or {})


def test_a_call_goes_around_its_operator_unless_autograd_or_a_mode_watches():
    @common.custom_op("qa_lib_tests::twice")
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def is_operator() -> bool:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            twice(torch.ones(3))
        return "qa_lib_tests::twice" in {event.key for event in profile.key_averages()}

    assert is_operator()
    with torch.no_grad():
        assert not is_operator()
        with Seen() as seen:
            twice(torch.ones(3))
    assert "qa_lib_tests.twice.default" in seen.names


KERNELS = [
    "embedding_chunk_sums",
    "embedding_gradient",
    "norm_forward",
    "norm_backward",
    "sum_partials",
    "dropout",
    "gelu_forward",
    "gelu_backward",
    "send",
    "mean",
    "spread",
    "square_sums",
    "adamw",
]
# Attention, and what computes in 8-bit floats.
KERNELS_OF_9_0 = [
    "varlen_attention_forward",
    "varlen_attention_backward",
    "attention_query_backward",
    "attention_distance_sums",
    "delta",
    "loss",
    "turned",
    "weights_in_e4m3",
    "cast",
]


@pytest.mark.triton
@pytest.mark.parametrize("capability", ["9.0", "7.5"])
def test_every_kernel_compiles_for_gpus_that_are_not_there(capability, tmp_path):
    """Triton's interpreter takes what its compiler does not: a float as a condition, for one."""
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    words = ("-m", "tests.compiling", capability)
    *first, found_at_first = python(*words, **environment).stdout.splitlines()
    *_, found_again = python(*words, **environment).stdout.splitlines()
    assert found_at_first == "found False"
    assert found_again == "found True", "the second has the first one's cache"
    wanted = set(KERNELS)
    if capability == "9.0":
        wanted |= set(KERNELS_OF_9_0)
    assert {line.split()[0].removesuffix("_kernel") for line in first} == wanted
