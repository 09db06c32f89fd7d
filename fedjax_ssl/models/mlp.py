"""Networks without convolutions, quick to compile, and BYOL's predictor."""

from typing import Annotated

from flax import linen as nn
from pydantic import Field

from fedjax_ssl.arrays import Features, Inputs, Outputs
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
    """Linear, batch norm, ReLU, linear, back to the number of features it was given (Grill et al. 2020, Section 3.3).

    FedCon's 12,288 hidden units on 4,096 features make 100,704,256 parameters.
    """

    hidden: int

    @nn.compact
    def __call__(self, features: Outputs, train: bool = False) -> Outputs:
        """Features float32 [B, F] -> [B, F]."""
        init = INITIALIZATIONS["torch"]
        x = nn.relu(nn.BatchNorm(not train)(dense(features, self.hidden, init)))
        return dense(x, features.shape[-1], init)
