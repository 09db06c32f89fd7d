"""(FL)^2 on CIFAR-10, few labels at the server.

    python -m launch.run --config=configs/fl2_cifar10.py:paper,labels=40,split=iid --config.data.data_dir=DIR

Expected (the paper's Table 1, mean and standard deviation of 3 seeds, in %; not yet reproduced here): 40 labels 81.5 (7.4) IID,
43.5 (7.5) Dirichlet .3, 36.4 (1.4) Dirichlet .1; 10 labels 38.9 (11.1), 24.3 (4.5), 19.2 (5.7).
`method=` runs the paper's baselines in this setting; 40 labels: `semifl` 75.3 (2.8), 38.0 (2.7), 19.9 (7.5); `fedmatch`
25.4 (2.8), 25.2 (3.5), 25.6 (2.2); `fedcon` 23.3 (6.2), 26.5 (2.1), 25.4 (2.3). With 10 labels they have 10.0 to 16.9.
`fixmatch` is the FixMatch + FedAvg of its Table 2; `uda`, and `supervised`, the labels alone, are not in the paper. `fedmatch`
has weights for a learning rate of .03 (`common.FEDMATCH_AT_LARGE_RATES`); the paper does not say which it had.
Run time: made for an accelerator. On two CPU cores two rounds with `--config.cohort_size=2 --config.client.epochs=1` take
minutes, compilation included.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(argument: str | None = None) -> ConfigDict:
    variant, given = common.parse(argument, ("paper", "released"), labels="40", split="iid", method="fl2")
    labels = common.number("labels", given["labels"])
    config = common.fl2("cifar10", variant, labels, given["split"], method=given["method"])
    if variant == "released":
        config.data.mean, config.data.std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
    return config
