"""The arithmetic of a training step."""

import torch


class StepCost:
    """Arithmetic of one training step, from the model's shapes and from what of it trains.

    A forward pass takes 2 FLOPs a parameter and token; the gradient by activations as much, from the top down to the
    lowest layer that trains; the gradient by weights as much for what trains. Attention scores and their use take
    4 x hidden x length^2 a layer forward and twice that backward. With all parameters training this is the usual
    6 x parameters x tokens + 12 x layers x hidden x sum of length^2 (Kaplan et al. 2020, PaLM's appendix B).
    Embeddings and the answer head are not counted.
    """

    def __init__(self, model: torch.nn.Module):
        encoder = {name: p for name, p in model.named_parameters() if ".encoder.layer." in name}
        base = {name: p for name, p in encoder.items() if ".lora_" not in name}
        self.parameters = sum(p.numel() for p in base.values())
        self.trained = sum(p.numel() for p in encoder.values() if p.requires_grad and p.ndim > 1)
        self.layers, self.hidden = model.config.num_hidden_layers, model.config.hidden_size
        embeddings = any(p.requires_grad for name, p in model.named_parameters() if ".embeddings." in name)
        training = [
            int(name.split(".encoder.layer.")[1].split(".")[0]) for name, p in encoder.items() if p.requires_grad
        ]
        lowest = 0 if embeddings else min(training, default=self.layers)
        self.passed = 1 - lowest / self.layers  # share of the layers that gradients pass through
        self.recomputed = any(getattr(m, "gradient_checkpointing", False) for m in model.modules()) * self.passed

    def flops(self, tokens: float, squares: float, recompute: bool = False) -> float:
        """FLOPs for so many tokens in rows whose squared lengths sum to `squares`; with `recompute`, as executed."""
        again = self.recomputed if recompute else 0.0
        linear = 2 * tokens * (self.parameters * (1 + self.passed + again) + self.trained)
        attention = 4 * self.layers * self.hidden * squares * (1 + 2 * self.passed + again)
        return linear + attention
