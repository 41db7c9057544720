"""The model gpt-oss: every layer is a mixture with biases, and the checkpoint stores all experts of
a layer in one tensor. The rest (sinks, windows, the clamped gate) is in ModelSpec."""

from pdserve.models.architectures.llama import Llama
from pdserve.models.architectures.mixture import MixtureLayer
from pdserve.models.layers.experts import ExpertNames


class _Layer(MixtureLayer):
    names = ExpertNames(router="mlp.router", is_stacked=True)


class GptOss(Llama):
    layer = _Layer
