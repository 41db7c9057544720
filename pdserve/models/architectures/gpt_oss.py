"""gpt-oss: mixtures in every layer, with biases, of which the checkpoint stores all experts in one
tensor; the rest (sinks, windows, the clamped gate) is in ModelSpec."""

from pdserve.models.architectures.llama import Llama
from pdserve.models.architectures.mixture import MixtureLayer
from pdserve.models.layers.experts import ExpertNames


class _Layer(MixtureLayer):
    names = ExpertNames(router="mlp.router", is_stacked=True)


class GptOss(Llama):
    layer = _Layer
