"""The arithmetic of a training step."""

import torch

from qa_lib.model.architectures import encoder_of, layers_of, layers_passed, param_counts


class StepFlops:
    """Arithmetic of one training step, from the model's shapes and from what of it trains.

    A forward pass takes 2 FLOPs a parameter and token; the gradient by activations as much, from the top down to the
    lowest layer that trains; the gradient by weights as much for what trains. Attention scores and their use take
    4 x hidden x length^2 a layer forward and twice that backward. With all parameters training this is the usual
    6 x parameters x tokens + 12 x layers x hidden x sum of length^2 (Kaplan et al. 2020, PaLM's appendix B).
    Embeddings, the answer head and the adapters' own forward pass are not counted. A decoder's head is, a GEMM as
    wide as the vocabulary; and of its attention half, since the other half of the scores is masked.
    """

    def __init__(self, model: torch.nn.Module):
        layers = layers_of(model)
        named = [(name, p) for layer in layers for name, p in layer.named_parameters()]
        counts = param_counts(model)
        self.parameters = sum(counts[p] for name, p in named if ".lora_" not in name)
        self.trained = sum(p.numel() for _, p in named if p.requires_grad and p.ndim > 1)
        encoder = encoder_of(model)
        head = model.get_submodule(encoder.head).weight if encoder.causal else torch.empty(0)
        self.head, self.head_trains, self.attended = head.numel(), head.requires_grad, 0.5 if encoder.causal else 1.0
        self.layers, self.hidden = len(layers), model.config.hidden_size
        self.passed = layers_passed(model) / self.layers  # share of the layers that gradients pass through
        self.recomputed = any(getattr(m, "gradient_checkpointing", False) for m in model.modules()) * self.passed

    def flops(self, tokens: float, squares: float, recompute: bool = False) -> float:
        """FLOPs for so many tokens in sequences whose squared lengths sum to `squares`; with `recompute`, as
        executed."""
        again = self.recomputed if recompute else 0.0
        linear = 2 * tokens * (self.parameters * (1 + self.passed + again) + self.trained)
        head = 2 * tokens * self.head * (2 + self.head_trains)
        attention = 4 * self.layers * self.hidden * self.attended * squares * (1 + 2 * self.passed + again)
        return linear + head + attention
