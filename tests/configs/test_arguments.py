"""A wrong argument behind a config's name is refused in one line that names it and what is accepted."""

import pytest

from tests.configs.common import settings
from tests.data.common import message_of

WRONG = [
    ("fl2_cifar10:publshed", ["publshed", "paper, released"]),
    ("fl2_cifar10:paper,labels=many", ["labels", "many", "whole number"]),
    ("fl2_cifar10:paper,label=40", ["label=40", "labels="]),
    ("fl2_cifar10:paper,released", ["released", "labels="]),
    ("fl2_cifar10:paper,split=dir", ["split", "dir0.1"]),
    ("fl2_cifar10:paper,split=dir-1", ["split", "dir-1"]),
    ("fl2_cifar10:paper,split=skewed", ["split", "skewed"]),
    ("fl2_cifar10:paper,method=semiflow", ["method", "semiflow", "fl2, semifl"]),
    ("fl2_ag_news:paper,method=fedcon", ["method", "fedcon", "fl2, semifl, fedmatch, fixmatch, uda, supervised"]),
    ("digits:feddure,split=skewed", ["split: got 'skewed', accepted: dirdir, iid, shards, l2, dir0.1"]),
    ("semifl_cifar10:released", ["released", "paper, no_global_labels, no_fine_tuning, fedavg_fixmatch"]),
    ("semifl_svhn:paper,split=l", ["split", "l2"]),
    ("feddure_cifar10:fedure", ["'fedure'", "feddure, no_c_reg"]),
    ("feddure_cifar10:fl2", ["'fl2'", "feddure, no_c_reg"]),
    ("feddure_cifar10:feddure,split=iid", ["split", "'iid'", "iid_iid, iid_dir, dir_dir"]),
    ("feddure_cifar10:feddure,gamma=0", ["gamma", "'0'", "> 0"]),
    ("feddure_cifar10:feddure,gamma=half", ["gamma", "'half'"]),
    ("feddure_cifar10:feddure,clients=few", ["clients", "'few'"]),
    ("feddure_cifar10:feddure,batch=10", ["batch", "'10'", "paper, released"]),
    ("fedlabel_cifar10:fedlabel", ["'fedlabel'", "paper, released, local_only, global_only"]),
    ("fedlabel_cifar10:supervised", ["'supervised'", "paper, released, local_only, global_only"]),
    ("fedlabel_cifar10:paper,labels=20", ["labels", "'20'", "(0, 1]"]),
    ("fedlabel_cifar10:paper,alpha=0", ["alpha", "'0'", "> 0"]),
    ("fedlabel_cifar10:paper,beta=-1", ["beta", "'-1'", "[0, 1]"]),
    ("fedlabel_cifar10:paper,beta=nan", ["beta", "'nan'", "[0, 1]"]),
    ("fedlabel_cifar10:uda,beta=0.5", ["beta", "'0.5'", "with uda"]),
    ("fedlabel_cifar10:paper,tau=many", ["tau", "'many'", "whole number"]),
    ("fedlabel_cifar10:paper,strong=usb", ["strong", "'usb'", "released, paper, none"]),
    ("fedmatch_cifar10:paper,split=dir0.1", ["the config's argument", "dir0.1", "accepted: "]),
    ("fedmatch_cifar10:paper,labels_at=client", ["the config's argument", "client", "accepted: "]),
    ("fedmatch_cifar10:fl2", ["the config's argument", "fl2", "accepted: "]),
    ("fedtrinet_mnist:fedmatch", ["got 'fedmatch', accepted: fedtrinet, fedsem"]),
    ("fedsiam_mnist:fedsiam", ["'fedsiam'", "d, mt, pi"]),
    ("fedsiam_mnist:pi,labels_at=home", ["labels_at", "'home'", "clients, server"]),
    ("fedsiam_mnist:pi,gamma=0", ["gamma", "'0'", "(0, 1]"]),
    ("fedsiam_mnist:pi,gamma=many", ["gamma", "'many'"]),
    ("fedsiam_mnist:pi,split=noniid", ["split", "'noniid'", "noniid1, noniid2"]),
    ("fedsiam_mnist:pi,labels_at=server,split=noniid2", ["split", "'noniid2'", "iid, noniid"]),
    ("fedsiam_mnist:pi,split=noniid3,gamma=0.2", ["gamma", "0.2", "noniid3"]),
    ("fedsiam_mnist:mt,curve=rectangle", ["curve", "'rectangle'", "with mt"]),
    ("fedsiam_mnist:d,curve=square", ["curve", "'square'", "linear, rectangle"]),
    ("fedsiam_mnist:pi,labels_at=server,variant=released", ["variant", "released", "labels_at=server", "accepted: paper"]),
    ("fedsiam_mnist:fl2", ["'fl2'", "labels_at=clients", "accepted: d, mt, pi"]),
]


@pytest.mark.parametrize(("name", "words"), WRONG)
def test_a_wrong_argument_is_named(name, words):
    message = message_of(ValueError, settings, name)
    assert all(word in message for word in words), message
