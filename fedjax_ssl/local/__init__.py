"""What methods are made of: the task, the one loop of local steps, shared objectives, the server's work."""

from fedjax_ssl.local.client import (
    Setup,
    client_metrics,
    client_repeats,
    data_weight,
    output_of,
    repeated,
    train_client,
    trainable,
)
from fedjax_ssl.local.forward_passes import class_probabilities
from fedjax_ssl.local.objectives import cross_entropy_gradients, labeled_loss, loss_gradients, mean_loss, supervised_gradient
from fedjax_ssl.local.server import Broadcast, Server, ServerState, ServerWork, averaging_method, server_work, train_server
from fedjax_ssl.local.task import Task, Weights, dropout_key, substream
from fedjax_ssl.local.training import Gradients, Trained, Training, TrainState, apply_gradients, gradients, minimize, train

__all__ = [
    "Broadcast", "Gradients", "Server", "ServerState", "ServerWork", "Setup", "Task", "TrainState", "Trained", "Training",
    "Weights", "apply_gradients", "averaging_method", "class_probabilities", "client_metrics", "client_repeats",
    "cross_entropy_gradients", "data_weight", "dropout_key", "gradients", "labeled_loss", "loss_gradients", "mean_loss",
    "minimize", "output_of", "repeated", "server_work", "substream", "supervised_gradient", "train", "train_client",
    "train_server", "trainable",
]  # fmt: skip
