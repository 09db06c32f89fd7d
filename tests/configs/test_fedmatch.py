"""FedMatch's config against the values of its paper and its released code, which are written out here."""

import pytest

from tests.configs.common import FIXMATCH, check, settings, values, without

BOTH = values("""
    method: name=fedmatch confidence=0.85 helpers=2 helper_period=10 lambda_s=10.0 lambda_i=0.01 lambda_a=0.01 lambda_l2=10.0
    model: name=resnet9 variant=fedmatch
    data: name=cifar10 resplit=(0.9,0.05,0.05) num_clients=100 mean=(0.0,0.0,0.0) std=(1.0,1.0,1.0) weak=none labeled=none
    data: strong=fedmatch
    client: epochs=1 steps=0
    server: momentum=0.0 learning_rate=1.0
    rounds=200 cohort_size=5
    client.optimizer, server.optimizer: name=sgd learning_rate=0.001 schedule=constant momentum=0.0 weight_decay=0.0
    client.optimizer, server.optimizer: clip_norm=0.0
""")
AT_SERVER = BOTH | values("""
    method: lambda_l1=1e-05 l1_thres=1e-05 delta_thres=1e-05
    data: labels_at=server num_labels=1000
    client: batch_size=100
    server: batch_size=100 epochs=1 pretrain=1
""")
AT_CLIENTS = BOTH | values("""
    method: lambda_l1=0.0001 l1_thres=5e-06 delta_thres=5e-05 unlabeled_batch_size=98
    data: labels_at=clients num_labels=5000
    client: batch_size=10
""")
UNLABELED = {"data.unlabeled_partition": "batch_imbalanced", "data.labeled_partition": "class_balanced"}


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        (None, AT_SERVER | {"data.partition": "class_balanced"}),
        ("paper,labels_at=server,split=noniid", AT_SERVER | {"data.partition": "batch_imbalanced"}),
        ("released", AT_SERVER | {"method.confidence": 0.75}),
        ("paper,labels_at=clients", AT_CLIENTS | {"data.partition": "class_balanced"}),
        ("released,labels_at=clients,split=noniid", AT_CLIENTS | UNLABELED | {"method.confidence": 0.75}),
        ("fixmatch", without(AT_SERVER, "method.") | FIXMATCH),
        ("fixmatch,labels_at=clients", without(AT_CLIENTS, "method.") | FIXMATCH | {"method.unlabeled_batch_size": 98}),
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
