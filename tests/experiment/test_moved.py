"""Keys that have another name than before: one line names the new one."""

import pytest

from fedjax_ssl.experiment.settings import Settings
from launch import config_file
from tests.data.common import message_of

OLD = {
    "server.momentum": ("0.0", "server.optimizer.momentum"),
    "server.learning_rate": ("1.0", "server.optimizer.learning_rate"),
    "server.optimizer.schedule": ("constant", "server.training.optimizer.schedule"),
    "server.batch_size": ("10", "server.training.batch_size"),
    "server.pretrain": ("0", "server.training.pretrain"),
    "server.training": ("parallel", "server.training.when"),
    "server.sbn_data": ("all", "server.static_norm.data"),
    "server.sbn_labeled_batch_size": ("10", "server.static_norm.labeled_batch_size"),
}


@pytest.mark.parametrize("key", OLD)
def test_an_old_key_is_refused_with_the_new_one(key):
    value, new = OLD[key]
    said = message_of(ValueError, config_file.read, "digits:fl2", {key: value})
    assert said == f"config.{key}: this key is config.{new} now"
    tree = {"server": {key.split(".")[1]: value if key.count(".") == 1 else {key.split(".")[2]: value}}}
    assert message_of(ValueError, Settings.from_dict, tree) == f"{key}: this key is {new} now"


@pytest.mark.parametrize(("method", "key"), [("fedlabel", "normalize"), ("fedsiam_mt", "normalization")])
def test_an_old_option_of_a_method_is_refused_with_the_new_one(method, key):
    said = message_of(ValueError, Settings.from_dict, {"method": {"name": method, key: "batch"}})
    assert said == f"method.{key}: this key is method.divisor now"
    # Of a method that has no such option it is a key like any other.
    assert "divisor" not in message_of(ValueError, Settings.from_dict, {"method": {"name": "fl2", key: "batch"}})
