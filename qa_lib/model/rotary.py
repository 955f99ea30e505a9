"""Rotary position embeddings, ModernBERT's, whose frequencies stay in fp32."""

from torch import nn
from transformers.models.modernbert.modeling_modernbert import ModernBertRotaryEmbedding


class ExactRotaryEmbedding(ModernBertRotaryEmbedding):
    """The angles by which queries and keys are turned, whose frequencies stay in fp32.

    Cast to half precision with the rest of a model, they would be rounded, and a token's angle off
    by a whole radian some hundreds of tokens on.
    """

    def _apply(self, fn, recurse=True):
        exact = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, moved in self.named_buffers():
            setattr(self, name, exact[name].to(moved.device))
        return self


def keep_frequencies(model: nn.Module) -> None:
    """Leave the frequencies of rotary embeddings in fp32 whatever a model is cast to, in place."""
    for module in model.modules():
        if isinstance(module, ModernBertRotaryEmbedding):
            module.__class__ = ExactRotaryEmbedding
