"""Among fake tensors a kernel is compiled, once a kind of arguments; starting it waits for that."""

import threading
from unittest.mock import MagicMock

import pytest
import torch
from torch import library
from torch._subclasses.fake_tensor import FakeTensorMode

from qa_lib.kernels import common
from tests.material import python


def started(kernel: MagicMock) -> list[tuple]:
    """What a kernel was started with."""
    grids = [each.args[0] for each in kernel.__getitem__.call_args_list]
    return [
        (grid, each.args, each.kwargs)
        for grid, each in zip(grids, kernel[...].call_args_list, strict=True)
    ]


@pytest.fixture
def compiled(monkeypatch):
    """What was compiled, each when the `gate` is open."""
    found, gate = [], threading.Event()

    def compile_later(kernel, likes, device):
        assert gate.wait(10)
        found.append((likes, device.type))

    monkeypatch.setattr(common, "_compile", compile_later)
    monkeypatch.setattr(common, "_compiling", {})
    yield found, gate
    gate.set()


def test_fake_tensors_start_nothing_and_have_each_kind_compiled_once(compiled):
    found, gate = compiled
    kernel = MagicMock()
    with FakeTensorMode():
        for rows in (3, 3, 5):
            x = torch.empty(rows, device="cuda")
            common.launch(kernel, (1,), x=(x, x.half()), y=None, rows=rows, BLOCK=8)
        on_cpu = (torch.empty(3), torch.empty(3))
        common.launch(kernel, (1,), x=on_cpu, y=None, rows=3, BLOCK=8)
    common.launch(kernel, (1,), x=torch.empty(3, device="meta"), rows=3)
    gate.set()
    common.wait(common._compiling.values())
    types = (torch.float32, torch.float16)
    assert sorted(found, key=str) == [
        ({"x": types, "y": None, "rows": rows, "BLOCK": 8}, "cuda") for rows in (3, 5)
    ]
    assert not started(kernel)


def test_what_is_started_waits_for_what_is_being_compiled(compiled):
    found, gate = compiled
    kernel, x = MagicMock(), torch.ones(2)
    with FakeTensorMode():
        common.launch(kernel, (1,), x=torch.empty(2, device="cuda"))
    threading.Timer(0.1, gate.set).start()
    common.launch(kernel, (7,), x=x, BLOCK=8)
    assert found and started(kernel) == [((7,), (), {"x": x, "BLOCK": 8})]


def test_an_operator_tells_shapes_by_what_it_does():
    @common.custom_op("qa_lib_tests::doubled")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return (
            x.new_empty(2 * len(x))
            if isinstance(x, torch._subclasses.FakeTensor)
            else torch.cat([x, x])
        )

    library.opcheck(doubled, (torch.ones(3),), test_utils=("test_schema", "test_faketensor"))
    assert (
        torch.compile(doubled, backend="aot_eager", fullgraph=True)(torch.ones(3)).tolist()
        == [1.0] * 6
    )


KERNELS = [
    "norm_forward",
    "norm_backward",
    "sum_partials",
    "dropout",
    "gelu_forward",
    "gelu_backward",
    "square_sums",
    "adamw",
]
# Attention, and what computes in 8-bit floats.
KERNELS_OF_9_0 = [
    "varlen_attention_forward",
    "varlen_attention_backward",
    "delta",
    "loss",
    "weight_in_e4m3",
    "cast",
]


@pytest.mark.triton
@pytest.mark.parametrize("capability", ["9.0", "7.5"])
def test_every_kernel_compiles_for_gpus_that_are_not_there(capability, tmp_path):
    """Triton's interpreter takes what its compiler does not: a float as a condition, for one."""
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    words = ("-m", "tests.compiling", capability)
    said = [python(*words, **environment).stdout.splitlines() for _ in range(2)]
    assert said[0].pop() == "found False"
    assert said[1].pop() == "found True", "the second has the first one's cache"
    kernels = [*KERNELS, *(KERNELS_OF_9_0 if capability == "9.0" else [])]
    compiled_kernels = {line.split()[0].removesuffix("_kernel") for line in said[0]}
    assert compiled_kernels == set(kernels)
