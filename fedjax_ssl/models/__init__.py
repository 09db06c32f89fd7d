"""Networks as pure functions: `build(name, num_classes=C)` gives `ModelFns`; `register_model` adds one's own."""

from fedjax_ssl.models.convolution import resolve_conv
from fedjax_ssl.models.network import ModelFns
from fedjax_ssl.models.nnx_modules import from_nnx
from fedjax_ssl.models.registry import (
    MODELS,
    build,
    default_options,
    feature_models,
    image_size,
    name_of,
    options_class,
    predictor,
    register_model,
)

__all__ = [
    "MODELS", "ModelFns", "build", "default_options", "feature_models", "from_nnx", "image_size", "name_of", "options_class",
    "predictor", "register_model", "resolve_conv",
]  # fmt: skip
