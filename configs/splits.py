"""The papers' splits by name, to look at before training.

    python -m launch.preview --config=splits:feddure_dir_dir --config.data.data_dir=DIR
    python -m launch.preview --config=splits:fedsiam_noniid3,dataset=mnist --config.data.data_dir=DIR

Expected: the table of the split of CIFAR-10, or `dataset`, over 100 clients, and preview.png. Run time: 10 to 30 s.
"""

from typing import Any

from .common import ConfigDict, base, parse

_FEDSIAM = {"labels_at": "clients", "labeled_fraction": (0.1,), "label_selection": "stratified"}  # as released

SPLITS: dict[str, dict[str, Any]] = {
    "fl2_iid": {"num_labels": 40, "partition": "iid"},
    "fl2_dir0.1": {"num_labels": 40, "partition": "dirichlet", "alpha": 0.1},
    "fl2_dir0.3": {"num_labels": 40, "partition": "dirichlet", "alpha": 0.3},
    "semifl_2_classes": {"num_labels": 250, "partition": "class_shards", "classes_per_client": 2},
    "fedcon_noniid": {
        "labeled_fraction": (0.01,), "label_selection": "random", "labels_first": False,
        "partition": "shards", "shards_per_client": 2,
    },
    "fedmatch_server_iid": {"resplit": (0.9, 0.05, 0.05), "num_labels": 1000, "partition": "class_balanced"},
    "fedmatch_server_noniid": {"resplit": (0.9, 0.05, 0.05), "num_labels": 1000, "partition": "batch_imbalanced"},
    "fedmatch_clients_iid": {
        "resplit": (0.9, 0.05, 0.05), "labels_at": "clients", "num_labels": 5000, "partition": "class_balanced",
    },
    "fedmatch_clients_noniid": {
        "resplit": (0.9, 0.05, 0.05), "labels_at": "clients", "num_labels": 5000,
        "labeled_partition": "class_balanced", "unlabeled_partition": "batch_imbalanced",
    },
    "feddure_iid_iid": {"labels_at": "clients", "num_labels": 5000, "partition": "class_balanced"},
    "feddure_iid_dir": {
        "labels_at": "clients", "num_labels": 5000,
        "labeled_partition": "class_balanced", "unlabeled_partition": "dirichlet", "alpha": 0.5,
    },
    "feddure_dir_dir": {
        "labels_at": "clients", "num_labels": 5000,
        "labeled_partition": "dirichlet", "unlabeled_partition": "dirichlet", "alpha": 0.5,
    },
    "fedlabel_20": {
        "resplit": (0.8, 0.05, 0.15), "labels_at": "clients", "labeled_fraction": (0.2,),
        "partition": "dirichlet_classes", "alpha": 0.1,
    },
    "fedsiam_iid": {"labels_at": "clients", "labeled_fraction": (0.1,), "partition": "iid"},
    "fedsiam_noniid1": {"labels_at": "clients", "labeled_fraction": (0.1,), "partition": "random_classes"},
    "fedsiam_noniid2": {
        "labels_at": "clients", "labeled_fraction": (0.1,), "labeled_partition": "random_classes", "unlabeled_partition": "iid",
    },
    "fedsiam_noniid3": {"labels_at": "clients", "labeled_fraction": (0.55,) * 10 + (0.05,) * 90, "partition": "iid"},
    "fedsiam_iid_released": _FEDSIAM | {"partition": "class_balanced"},
    "fedsiam_noniid1_released": _FEDSIAM | {"partition": "class_grid"},
    "fedsiam_noniid2_released": _FEDSIAM | {"labeled_partition": "class_grid", "unlabeled_partition": "iid"},
    "fedsiam_noniid3_released": _FEDSIAM | {
        "labeled_fraction": (0.55,) * 10 + (0.05,) * 90, "partition": "class_balanced",
    },
    "fedsiam_server_noniid": {"labeled_fraction": (0.01,), "partition": "random_classes"},
}  # fmt: skip
"""Name -> what it sets under `data`."""


def get_config(argument: str | None = None) -> ConfigDict:
    name, given = parse(argument, tuple(SPLITS), dataset="cifar10")
    at_clients = SPLITS[name].get("labels_at") == "clients"
    config = base("fedavg" if at_clients else "supervised", "wide_resnet", depth=28, width=2)
    config.data.name = given["dataset"]
    config.server.static_norm.data = "cohort" if at_clients else "labeled"
    config.data.update(SPLITS[name])
    return config
