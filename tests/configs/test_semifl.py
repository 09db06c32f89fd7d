"""SemiFL's config files, and its place in (FL)^2's comparison: values of the papers and the released code, written out."""

import pytest

from fedjax_ssl.data.catalog import DATASETS
from tests.configs import test_configs as fl2
from tests.configs.common import check, settings, values, without

SPLITS = fl2.SPLITS | {"l2": {"data.partition": "class_shards", "data.classes_per_client": 2}}
PAPER = values("""
    method: name=semifl prox_mu=0.0 confidence=0.95 pseudo_labels=global mix=mixup mixup_alpha=0.75
    model: name=wide_resnet norm=static depth=28 width=2
    data: num_clients=100 exclude_labeled=True label_selection=balanced min_size=10 weak=default strong=semifl
    client: batch_size=10 epochs=5 steps=0
    server: epochs=5 steps=0 momentum=0.5 learning_rate=1.0 pretrain=0 training=after sbn_data=all sbn_order=joined
    server: sbn_unlabeled_batch_size=250 sbn_weighting=batches
    rounds=800 cohort_size=10
    client.optimizer, server.optimizer: name=sgd learning_rate=0.03 schedule=cosine momentum=0.9 nesterov=True
    client.optimizer, server.optimizer: weight_decay=0.0005 clip_norm=1.0 persistent=True
""")
CIFAR10 = {"data.name": "cifar10", "data.mean": (0.4914, 0.4822, 0.4465), "data.std": (0.2023, 0.1994, 0.2010)}
CASES = [  # file, labels, server's batch size, dataset
    ("semifl_cifar10", 250, 10, CIFAR10),
    ("semifl_cifar10", 4000, 250, CIFAR10),
    ("semifl_cifar100", 2500, 250, fl2.CIFAR100),
    ("semifl_cifar100", 10000, 250, fl2.CIFAR100),
    ("semifl_svhn", 250, 10, fl2.SVHN),
    ("semifl_svhn", 1000, 10, fl2.SVHN),
]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("file", "labels", "batch_size", "dataset"), CASES, ids=[f"{f},{n}" for f, n, *_ in CASES])
def test_the_semifl_configs_are_the_papers(file, labels, batch_size, dataset, split):
    expected = PAPER | dataset | SPLITS[split] | {"data.num_labels": labels, "server.batch_size": batch_size}
    check(settings(file, f"paper,labels={labels},split={split}"), expected)


def test_the_datasets_own_views_and_normalization_are_semifls():
    cifar10, cifar100, svhn = (DATASETS[name] for name in ("cifar10", "cifar100", "svhn_cropped"))
    assert (cifar10.weak, cifar100.weak, svhn.weak) == ("flip_crop4", "flip_crop4", "crop4")
    assert (cifar100.mean, cifar100.std) == ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
    assert (svhn.mean, svhn.std) == ((0.4377, 0.4438, 0.4728), (0.198, 0.201, 0.197))


BATCH, PARALLEL = {"method.pseudo_labels": "batch", "method.mix": "none"}, {"server.training": "parallel"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [("paper", {}), ("no_global_labels", BATCH), ("no_fine_tuning", PARALLEL), ("fedavg_fixmatch", BATCH | PARALLEL)],
)
def test_the_rows_of_the_ablation_are_words(row, expected):
    ablation = settings("semifl_cifar10", f"{row},labels=4000,split=l2")
    check(ablation, PAPER | CIFAR10 | SPLITS["l2"] | {"server.batch_size": 250} | expected)


def test_the_servers_labels_alone_are_trained_on_in_its_setting():
    expected = without(PAPER, "method.") | CIFAR10 | SPLITS["iid"]
    expected |= {"method.name": "supervised", "data.num_labels": 250, "server.sbn_data": "labeled"}
    check(settings("semifl_cifar10", "supervised,labels=250"), expected | {"server.batch_size": 10})


@pytest.mark.parametrize("file", sorted({file for file, *_ in CASES}))
def test_the_larger_number_of_labels_and_iid_are_the_defaults(file):
    labels = max(labels for name, labels, *_ in CASES if name == file)
    assert settings(file) == settings(file, f"paper,labels={labels},split=iid")


# In (FL)^2's setting: its data, network, optimizers and epochs, and client batches of 10. SemiFL's own are the method,
# clipping, no pre-training, and its statistics.
OWN = {key: value for key, value in PAPER.items() if key.startswith(("method.", "server.sbn_"))}
OWN |= {"client.batch_size": 10, "client.optimizer.clip_norm": 1.0, "server.optimizer.clip_norm": 1.0, "server.pretrain": 0}
COMPARED = without(fl2.PAPER, "method.") | OWN


@pytest.mark.parametrize("file", ["fl2_cifar10", "fl2_cifar100", "fl2_svhn", "fl2_fashion_mnist", "fl2_ag_news"])
def test_every_fl2_config_runs_semifl_too(file):
    text = {"method.mix": "none", "client.epochs": 20, "model.name": "linear", "data.strong": "default"}
    own = {"fl2_cifar100": {"model.width": 8}, "fl2_ag_news": text}.get(file, {})
    expected = COMPARED | own
    if file == "fl2_ag_news":
        expected = without(expected, ("model.depth", "model.width"))
    check(settings(file, "paper,method=semifl"), expected)
    released = {f"{holder}.optimizer.schedule": "constant" for holder in ("client", "server")}
    released |= {} if file == "fl2_ag_news" else {"data.strong": "fl2_released"}
    check(settings(file, "released,method=semifl"), expected | released)
    assert settings(file, "paper,method=fl2") == settings(file)
