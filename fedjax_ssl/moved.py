"""Keys of configs that have another name than before: the one table of them, for messages and for older runs' folders."""

from collections.abc import Iterable, Mapping
from typing import Any

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
}
"""Old dotted key -> new one. Some keys of `server.optimizer` are still there and mean another optimizer now."""

_RENAMED_VALUES: dict[tuple[str, str], dict[str, str]] = {
    ("fixmatch", "method.divisor"): {"accepted": "used"},
    ("fedlabel", "method.normalize"): {"passing": "used"},
    **{(f"fedsiam_{kind}", "method.normalization"): {"paper": "used", "released": "batch"} for kind in ("pi", "mt", "d")},
    ("semifl", "method.pseudo_labels"): {"batch": "local"},
}
"""Method and old key -> old value -> new one."""


def line(key: str, known: Iterable[str]) -> str:
    """What to say of a key that is not accepted and was once that of a `known` key, of the config or after `config.`; or ""."""
    bare = key.removeprefix("config.")
    new = key.removesuffix(bare) + MOVED.get(bare, " ")
    return f"{key}: this key is {new} now" if new in known else ""


def is_older(flat: Mapping[str, Any]) -> bool:
    """Whether a whole config, of dotted keys, is one that a version with the old keys has written."""
    return "server.pretrain" in flat


def current(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A whole config, of dotted keys, with the keys and values of today, if it is an older one; today's as it is."""
    if not is_older(flat):
        return dict(flat)
    method = str(flat.get("method.name", ""))
    values = {key: _RENAMED_VALUES.get((method, key), {}) for key in flat}
    return {renamed(key, method): values[key].get(str(value), value) for key, value in flat.items()}


def renamed(key: str, method: str) -> str:
    """Today's name of a dotted key in an older config with a `method`."""
    is_ours = key.startswith("server.") or (method, key) in _RENAMED_VALUES  # a method of one's own may have such a key
    return MOVED.get(key, key) if is_ours else key
