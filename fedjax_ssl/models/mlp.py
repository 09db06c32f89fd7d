"""Networks without convolutions, quick to compile, and what follows a backbone where it learns without labels."""

from typing import Annotated

from flax import linen as nn
from jaxtyping import Float32
from pydantic import Field

from fedjax_ssl.arrays import Array, Features, Inputs, Outputs
from fedjax_ssl.models.initializers import INITIALIZATIONS
from fedjax_ssl.models.layers import dense
from fedjax_ssl.models.network import Network


class Linear(Network):
    """Multinomial logistic regression on the flattened input."""

    def features(self, images: Inputs, train: bool) -> Features:
        """The inputs as they are."""
        return images.reshape(images.shape[0], -1)


class MLP(Network):
    """One hidden layer of ReLU units on the flattened input."""

    shared_layers = ("Dense_0",)
    hidden: Annotated[int, Field(ge=1, le=1_000_000, description="Units of the hidden layer.")] = 64

    def features(self, images: Inputs, train: bool) -> Features:
        """The hidden units."""
        return nn.relu(dense(images.reshape(images.shape[0], -1), self.hidden, INITIALIZATIONS["kaiming"]))


class Predictor(nn.Module):
    """Linear, batch norm, ReLU, linear: BYOL's predictor (Grill et al. 2020, Section 3.3), and projections like SimCLR's.

    It has as many outputs as it is given features, unless `outputs` says how many. FedCon's 12,288 hidden units on 4,096
    features make 100,704,256 parameters.
    """

    hidden: int
    outputs: int = 0

    @nn.compact
    def __call__(self, features: Outputs, train: bool = False) -> Float32[Array, "B _"]:
        """Features float32 [B, F] -> [B, F], or [B, outputs]."""
        init = INITIALIZATIONS["torch"]
        x = nn.relu(nn.BatchNorm(not train)(dense(features, self.hidden, init)))
        return dense(x, self.outputs or features.shape[-1], init)
