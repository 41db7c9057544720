"""Decides which int4 weights have activations in fp8 (model.activation_dtype), and checks what that
does not go with."""

from pdserve.configs.engine import ActivationDtype, OnlineScheme
from pdserve.models.formats.formats import Formats
from pdserve.models.formats.source_format import Kind, SourceFormat


def with_activations(
    formats: Formats | None, asked: ActivationDtype, online: OnlineScheme | None
) -> Formats | None:
    """Returns the formats with activations as model.activation_dtype asks for them. Raises
    ValueError if the weights do not go with it.

    online: model.quantization.
    """
    if asked == "auto":
        return formats
    if asked == "16-bit":
        _check_no_fp8_weights(formats, online)
        return None if formats is None else formats.changed(lambda f: _as(f, "int4_fp8", "int4"))
    if formats is None and online is None:
        raise ValueError(
            "model.activation_dtype: fp8 needs weights that are quantised, but this model's have "
            "16 bits: set model.quantization to fp8, too, or leave activation_dtype out"
        )
    return None if formats is None else formats.changed(lambda f: _as(f, "int4", "int4_fp8"))


def check_experts(formats: Formats | None, asked: ActivationDtype) -> None:
    """Raises ValueError if a mixture of experts in int4 would have activations in fp8."""
    if formats is None or all(format.kind != "int4_fp8" for format in formats.quantised):
        return
    what = "model.activation_dtype: fp8 is"
    if asked == "auto":
        what = f"input_activations in fp8, from {formats.place}, are"
    raise ValueError(
        f"{what} not supported for mixtures of experts, because experts in int4 are multiplied by "
        "activations in 16 bits: set model.activation_dtype to 16-bit"
    )


def _as(format: SourceFormat, kind: Kind, other: Kind) -> SourceFormat:
    return format.model_copy(update={"kind": other}) if format.kind == kind else format


def _check_no_fp8_weights(formats: Formats | None, online: OnlineScheme | None) -> None:
    stored = () if formats is None else formats.quantised
    found = [str(format) for format in stored if format.kind in ("fp8", "fp8_block")]
    if online is not None:
        found = [f"model.quantization: {online}"]
    if found:
        raise ValueError(
            f"model.activation_dtype: 16-bit does not go with fp8 weights ({' and '.join(found)}), "
            "whose products round activations to fp8: leave it out"
        )
