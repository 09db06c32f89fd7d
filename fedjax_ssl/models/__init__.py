"""Networks as pure functions: `build(name, num_classes=C)` gives `ModelFns`; `register_model` adds one's own."""

from fedjax_ssl.models.convolution import resolve_conv
from fedjax_ssl.models.mlp import Predictor
from fedjax_ssl.models.network import ModelFns, pure
from fedjax_ssl.models.nnx_modules import from_nnx
from fedjax_ssl.models.registry import MODELS, build, feature_models, name_of, register_model

__all__ = [
    "MODELS", "ModelFns", "Predictor", "build", "feature_models", "from_nnx", "name_of", "pure", "register_model",
    "resolve_conv",
]  # fmt: skip
