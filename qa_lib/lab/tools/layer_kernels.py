"""The kernels that a compiler's backend makes of one layer's forward pass."""

import re
from dataclasses import dataclass

import torch
from torch._inductor.utils import get_code
from torch.fx.experimental.proxy_tensor import make_fx

from qa_lib.measure.hardware import train_device
from qa_lib.model.architectures import layers_of
from qa_lib.model.build import build_model
from qa_lib.spec.spec import Spec
from qa_lib.train.optim import Precision

SHAPE = (8, 64)  # samples and tokens of the layer's input
WITHOUT_WORK = ("_unsafe_view", "empty_like")  # operators that compute nothing
# A line of Inductor's program that starts a kernel; its group is the kernel's name.
START = re.compile(
    r"(?m)^ +(?:buf\d+ = )?"
    r"((?:extern_kernels|aten|torch\.ops\.aten|cpp_fused|triton)\w*(?:\.\w+)*)\("
)
SHOWN = 24  # lines of a kernel's code


@dataclass(frozen=True)
class LayerKernels:
    """One layer's forward pass, operator by operator and as Inductor compiles it."""

    operators: list[str]
    """What PyTorch runs without a compiler, in order."""
    kernels: list[str]
    """What the compiled program starts, in order."""
    code: str
    """The beginning of a kernel that Inductor wrote: C++ for a CPU, Triton for a GPU."""


def layer_kernels(spec: Spec) -> LayerKernels:
    """Compile the first layer of a spec's model on this machine, and return what came of it."""
    device = train_device()
    model = build_model(spec).train()
    layer = layers_of(model)[0].to(device)
    hidden = torch.randn(*SHAPE, model.config.hidden_size, device=device)
    precision = Precision(spec.settings, device)
    # What comes from a cache has no program to read.
    with (
        torch.no_grad(),
        precision.autocast(),
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        nodes = make_fx(layer)(hidden).graph.nodes
        (program, *_) = get_code(torch.compile(layer), hidden)
    operators = []
    for node in nodes:
        if node.op == "call_function" and not getattr(node.target, "is_view", True):
            operators.append(node.target.overloadpacket.__name__)
    kernels = START.findall(program)
    return LayerKernels(
        operators=[name for name in operators if name not in WITHOUT_WORK],
        kernels=kernels,
        code=_beginning_of_a_kernel(program, kernels),
    )


def _beginning_of_a_kernel(program: str, kernels: list[str]) -> str:
    """Return the first lines of a kernel in Inductor's program: that with GELU if there is one."""
    written = [
        name.removesuffix(".run") for name in kernels if name.startswith(("cpp_", "triton_"))
    ]
    name = next((name for name in written if "gelu" in name), written[-1])
    after_its_name = program[program.index(f"\n{name} = ") :]
    code = after_its_name.split("\n@triton.jit", 1)[-1]
    return "\n".join(code.split("\n")[1 : 1 + SHOWN])
