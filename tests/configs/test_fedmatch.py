"""FedMatch's config against the values of its paper and its released code, which are written out here."""

import pytest

from tests.configs.test_configs import check, settings

BOTH = {
    "method.name": "fedmatch",
    "method.confidence": 0.85,
    "method.helpers": 2,
    "method.helper_period": 10,
    "method.lambda_s": 10.0,
    "method.lambda_i": 0.01,
    "method.lambda_a": 0.01,
    "method.lambda_l2": 10.0,
    "model.name": "resnet9",
    "model.variant": "fedmatch",
    "data.name": "cifar10",
    "data.resplit": (0.9, 0.05, 0.05),
    "data.num_clients": 100,
    "data.mean": (0.0, 0.0, 0.0),
    "data.std": (1.0, 1.0, 1.0),
    "data.weak": "none",
    "data.labeled": "none",
    "data.strong": "fedmatch",
    "client.epochs": 1,
    "client.steps": 0,
    "server.momentum": 0.0,
    "server.learning_rate": 1.0,
    "rounds": 200,
    "cohort_size": 5,
    **{
        f"{holder}.optimizer.{key}": value
        for holder in ("client", "server")
        for key, value in {
            "name": "sgd",
            "learning_rate": 1e-3,
            "schedule": "constant",
            "momentum": 0.0,
            "weight_decay": 0.0,
            "clip_norm": 0.0,
        }.items()
    },
}
AT_SERVER = BOTH | {
    "method.lambda_l1": 1e-5,
    "method.l1_thres": 1e-5,
    "method.delta_thres": 1e-5,
    "data.labels_at": "server",
    "data.num_labels": 1000,
    "client.batch_size": 100,
    "server.batch_size": 100,
    "server.epochs": 1,
    "server.pretrain": 1,
}
AT_CLIENTS = BOTH | {
    "method.lambda_l1": 1e-4,
    "method.l1_thres": 5e-6,
    "method.delta_thres": 5e-5,
    "method.unlabeled_batch_size": 98,
    "data.labels_at": "clients",
    "data.num_labels": 5000,
    "client.batch_size": 10,
}
FIXMATCH = {
    "method.name": "fixmatch",
    "method.confidence": 0.95,
    "method.pseudo_labels": "local",
    "method.divisor": "batch",
    "method.strict": False,
}
UNLABELED = {"data.unlabeled_partition": "batch_imbalanced", "data.labeled_partition": "class_balanced"}


def fixmatch(expected: dict) -> dict:
    """The same setting, and FixMatch as it was published."""
    batches = ("method.unlabeled_batch_size",)
    return {key: value for key, value in expected.items() if not key.startswith("method.") or key in batches} | FIXMATCH


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        (None, AT_SERVER | {"data.partition": "class_balanced"}),
        ("paper,labels_at=server,split=noniid", AT_SERVER | {"data.partition": "batch_imbalanced"}),
        ("released", AT_SERVER | {"method.confidence": 0.75}),
        ("paper,labels_at=clients", AT_CLIENTS | {"data.partition": "class_balanced"}),
        ("released,labels_at=clients,split=noniid", AT_CLIENTS | UNLABELED | {"method.confidence": 0.75}),
        ("fixmatch", fixmatch(AT_SERVER)),
        ("fixmatch,labels_at=clients", fixmatch(AT_CLIENTS)),
    ],
)
def test_the_config_is_the_papers_and_the_released_codes(argument, expected):
    check(settings("fedmatch_cifar10", argument), expected)


def test_in_fl2s_setting_only_the_method_is_its_own():
    ours, theirs = (settings("fl2_svhn", f"paper,labels=250,split=dir0.1,method={name}") for name in ("fedmatch", "fl2"))
    assert ours.method["name"] == "fedmatch"
    # Its own weights are for a learning rate thirty times smaller.
    assert [ours.method[key] for key in ("lambda_s", "lambda_a", "lambda_i", "lambda_l2")] == [1.0, 1.0, 0.01, 0.01]
    for group in ("model", "data", "client", "server", "rounds", "cohort_size"):
        assert getattr(ours, group) == getattr(theirs, group)


@pytest.mark.parametrize("argument", ["paper,split=dir0.1", "paper,labels_at=client", "fl2"])
def test_a_wrong_argument_is_refused(argument):
    with pytest.raises(ValueError, match=r"^the config's argument.*accepted: "):
        settings("fedmatch_cifar10", argument)
