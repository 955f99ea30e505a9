"""What the compiler makes of a layer, to look at: the operators that it is given and the kernels that it writes."""

import dataclasses
import re

import torch
import torch._functorch.config
from torch._inductor.utils import get_code
from torch.fx.experimental.proxy_tensor import make_fx

from qa_lib.model.build import build_model
from qa_lib.model.encoders import layers_of
from qa_lib.spec import Spec
from qa_lib.train.compilation import forget_compiled
from qa_lib.train.precision import Precision

SHAPE = (8, 64)  # rows and tokens of the input; the kernels are the same for others
NO_WORK = ("_unsafe_view", "empty_like")  # beside the views
# In the program that inductor generates, the lines that start a kernel.
CALLS = re.compile(r"^ +(?:buf\d+ = )?((?:extern_kernels|aten|torch\.ops\.aten|cpp_fused|triton)\w*(?:\.\w+)*)\(", re.M)


def translated(spec: Spec, device: torch.device) -> tuple[list[str], list[str], str]:
    """The forward pass of one layer of a row's model, with attention `sdpa` and without packing: the operators that run
    without a compiler, the kernels that inductor's program calls in their place, and that program. Nothing of it is
    compiled to machine code."""
    spec = dataclasses.replace(
        spec, settings=dataclasses.replace(spec.settings, attention="sdpa", padding="max_length")
    )
    precision = Precision(spec.settings, device)
    model = build_model(spec).to(device, precision.weights).train()
    layer, hidden = layers_of(model)[0], torch.randn(*SHAPE, model.config.hidden_size, device=device)
    hidden = hidden.to(precision.weights)
    with torch.no_grad(), precision.autocast():
        called = [node.target for node in make_fx(layer)(hidden).graph.nodes if node.op == "call_function"]
        # From a cache there would be no program to read.
        with (
            torch._inductor.config.patch(fx_graph_cache=False),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            program = get_code(torch.compile(layer), hidden)[0]
    forget_compiled()
    operators = [each for each in called if isinstance(each, torch._ops.OpOverload) and not each.is_view]
    names = [each.overloadpacket.__name__ for each in operators]
    return [name for name in names if name not in NO_WORK], CALLS.findall(program), program
