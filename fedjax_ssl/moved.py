"""Keys of configs that have another name than before: the one table of them, for messages."""

from collections.abc import Iterable, Mapping

_TRAINING = ("batch_size", "epochs", "steps", "pretrain")
_OPTIMIZER = ("name", "learning_rate", "schedule", "momentum", "nesterov", "weight_decay", "decay", "clip_norm", "persistent")
_NORM = ("data", "weighting", "order", "labeled_batch_size", "unlabeled_batch_size")

MOVED: dict[str, str] = {
    "server.momentum": "server.optimizer.momentum",
    "server.learning_rate": "server.optimizer.learning_rate",
    "server.training": "server.training.when",
    **{f"server.{key}": f"server.training.{key}" for key in _TRAINING},
    **{f"server.optimizer.{key}": f"server.training.optimizer.{key}" for key in _OPTIMIZER},
    **{f"server.sbn_{key}": f"server.static_norm.{key}" for key in _NORM},
    "method.normalize": "method.divisor",
    "method.normalization": "method.divisor",
    "method.threshold_clip": "method.largest_threshold",
}
"""Old dotted key -> new one. Some keys of `server.optimizer` are still there and mean another optimizer now."""


def line(key: str, known: Iterable[str]) -> str:
    """A message if `key` is the old name of a `known` key, else "". Keys may begin with `config.`."""
    bare = key.removeprefix("config.")
    new = key.removesuffix(bare) + MOVED.get(bare, " ")
    return f"{key}: this key is {new} now" if new in known else ""


def check(flat: Mapping[str, object]) -> None:
    """Raises ValueError where a whole config, of dotted keys, is one that a version with the old keys has written."""
    if "server.pretrain" in flat:
        raise ValueError(f"an earlier version wrote it: {line('server.pretrain', MOVED.values())}")
