"""(FL)^2 on AG News, 20 labels at the server: a linear classifier on frozen features of bert-base-uncased.

    python -m launch.text_features --train=train.csv --test=test.csv --train_strong=back_translated.csv --per_class=12500 \
        --out=ag_news.npz
    python -m launch.run --config=configs/fl2_ag_news.py:paper,labels=20,split=iid --config.data.path=ag_news.npz

The paper's 20 epochs are taken as local ones; its optimizer, which it does not state, as CIFAR-10's. Its code has no loader.
`method=semifl` runs SemiFL in this setting, without mixup; other methods as in `configs/fl2_cifar10.py`, but for FedCon, whose
clients train the layers before a classifier.
Expected result: none measured yet. Run time: minutes; a linear classifier on 768 features.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(argument: str | None = None) -> ConfigDict:
    variant, given = common.parse(argument, ("paper", "released"), labels="20", split="iid", method="fl2")
    labels = common.number("labels", given["labels"])
    config = common.fl2("ag_news", variant, labels, given["split"], method=given["method"], linear=True)
    config.client.epochs = 20
    if "mix" in config.method:
        config.method.mix = "none"  # as in the paper
    return config
