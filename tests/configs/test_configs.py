"""Every config file with its arguments, without data: it builds, and has the papers' values, which `cases.txt` writes out."""

import importlib
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import common
from fedjax_ssl.data.catalog import DATASETS
from fedjax_ssl.data.sources import Dataset
from fedjax_ssl.data.split import draw
from fedjax_ssl.experiment.plan import plan_of
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.experiment.unread import facts, ignored, unread_by
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.fedsiam_d import upload_share
from launch import config_file
from tests import tiny
from tests.data.common import labels_alone

FILES = {
    path.stem
    for path in (pathlib.Path(__file__).parents[2] / "configs").glob("*.py")
    if "def get_config" in path.read_text(encoding="utf-8")
}


def settings(name: str, argument: str | None = None) -> Settings:
    """The settings of a config file, whose argument may also stand behind a colon. It is made without JAX's devices."""
    file, _, behind = name.partition(":")
    with jax.transfer_guard("disallow"):
        config = importlib.import_module(f"configs.{file}").get_config(argument or behind or None)
    return Settings.from_dict(config.to_dict())


def value(text: str):
    """A number, a tuple of them or a truth value; any other word is a text."""
    try:
        return eval(text, {"__builtins__": {}})
    except (NameError, SyntaxError):
        return text


def tables() -> dict[str, dict]:
    """The tables of `cases.txt`."""
    found, groups = {}, [""]
    for line in pathlib.Path(__file__).with_name("cases.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        if not line.startswith(" "):
            name, _, line = line.partition(" =")
            table, groups = found.setdefault(name, {}), [""]
            assert not table, f"{name} twice"
        for part in line.split():
            key, _, text = part.partition("=")
            if part.endswith(":"):
                groups = [f"{group}." for group in part[:-1].split(",")]
            elif part.startswith("-"):
                for old in [old for old in table if old.startswith(part[1:])]:
                    del table[old]
            elif part in found:
                table |= found[part]
            else:
                whole = "." in key or key in Settings.model_fields.keys() - {"data"}  # which `server.static_norm` has, too
                table |= {key if whole else f"{group}{key}": value(text) for group in groups}
    return found


def flat(tree: dict, prefix: str = "") -> dict:
    items = [(f"{prefix}{key}", value) for key, value in tree.items()]
    return dict(itertools.chain(*(flat(v, f"{k}.").items() if isinstance(v, dict) else [(k, v)] for k, v in items)))


BATCH_NORM: dict[tuple, bool] = {}  # of networks, which take long to trace


def unread(given: Settings) -> dict[str, str]:
    """The keys that a run of a config does not read, whose data are a few images in place of its own."""
    name = given.data.name
    classes = DATASETS[name].classes
    side, channels = 28 if "mnist" in name else 8 if name == "digits" else 32, max(1, len(DATASETS[name].mean))
    images = np.zeros((classes, side, side, channels), np.uint8)
    if DATASETS[name].kind == "text_features":
        images = np.zeros((classes, 2, 64), np.float32)
    arrays = [images, np.arange(classes, dtype=np.int32)] * 2
    few = given.model_copy(update={"data": given.data.model_copy(update={"mean": (), "std": ()})})
    plan = plan_of(few, Dataset(name, *arrays, classes))
    network = (*given.model, plan.spec.image_shape)
    if network not in BATCH_NORM:
        BATCH_NORM[network] = bool(jax.eval_shape(lambda: plan.task().init(jax.random.key(0), plan.spec.image_shape)).stats)
    has_batch_norm = BATCH_NORM[network]
    method = plan._replace(has_batch_norm=has_batch_norm).method()
    return unread_by(given, facts(given, method, has_batch_norm=has_batch_norm))


STRONG = (
    *("fl2", "semifl", "fedmatch", "fixmatch", "uda", "fedlabel", "feddure", "freematch_central", "fixmatch_central"),
    *("sage", "feddb", "twinsight", "freematch"),
)
VIEWS_OF = dict.fromkeys(STRONG, ("weak", "strong"))
VIEWS_OF |= dict.fromkeys(("fedcon", "fedsiam_pi", "fedsiam_mt", "fedsiam_d", "fedavg_pp", "rscfed", "cbafed"), ("weak",))
"""The views that each method trains on, by its paper, and not by what is checked here; strong views follow the weak one."""


def check(got: Settings, expected: dict) -> None:
    """The config has what is expected of it; a key that its run does not read, which papers may state, has its default."""
    found, without = flat(got.to_dict()), {*unread(got)}
    for own in (got, got.model_copy(update={"data": got.data.resolved()})):  # as it is written, and as a run's folder has it
        assert ignored(own, unread(own)) == {}
    if getattr(got.method, "augment", "") != "none":  # FedLabel's ablation
        without -= {f"data.{view}" for view in VIEWS_OF.get(got.method.name, ())}
    expected = {key: value for key, value in expected.items() if key not in without}
    assert {key: found.get(key, "absent") for key in expected} == expected


TABLES = tables()
CASES = {name: table for name, table in TABLES.items() if not name.isupper()}


@pytest.mark.parametrize("name", CASES)
def test_a_config_is_what_its_paper_or_its_code_states(name):
    check(settings(name), CASES[name])


WITHOUT_SMALL = ("digits", "splits", "fl2_ag_news", "pfl_cifar10", "central_cifar10", "central_cifar100", "central_svhn")


@pytest.mark.parametrize("name", sorted(FILES))
def test_small_changes_the_size_of_a_papers_config_and_nothing_else(name):
    if name in WITHOUT_SMALL:
        assert config_file.smaller(f"--config={name}") == ""
        return
    assert config_file.smaller(f"--config={name}") == f"{name}:small"
    assert config_file.smaller(f"--config={name}:small") == ""
    small, whole = (settings(name, argument) for argument in ("small", None))
    assert (small.rounds, small.cohort_size, small.data.num_clients) == (
        30,
        min(4, whole.cohort_size),
        min(20, whole.data.num_clients),
    )
    assert small.client.epochs == min(1, whole.client.epochs)
    assert small.model.name in ("cnn", "mnist_cnn")
    assert ignored(small, unread(small)) == {}
    sizes = ("rounds", "cohort_size", "data.num_clients", "client.epochs", "eval_every", "checkpoint_every")
    changed = {key: value for key, value in flat(whole.to_dict()).items() if flat(small.to_dict()).get(key) != value}
    phases = ("client.unlabeled_wait", "labeled_cohort") if name.startswith("cbafed") else ()
    assert {key for key in changed if not key.startswith("model.")} <= {*sizes, *phases}
    assert (small.model.norm, small.model.norm_momentum) == (whole.model.norm, whole.model.norm_momentum)
    with pytest.raises(ValueError, match=r"got 'small=1', accepted: (.*, )?small"):
        settings(name, "small=1")


def test_small_keeps_the_shares_of_phases_that_are_numbers_of_rounds():
    small = settings("cbafed_svhn", "small")  # of 547 rounds 46 are without the clients that have no labels
    assert (small.rounds, small.client.unlabeled_wait, small.labeled_cohort) == (30, 3, 1)
    assert settings("fedlabel_cifar10", "released,small").method.for_rounds(30).burn_in == 1  # of 2,000 rounds 50


def test_small_takes_a_fifth_of_the_clients_with_their_own_shares_and_keeps_a_client_for_each_pair_of_classes():
    uneven = settings("fedsiam_mnist", "d,small,split=noniid3").data
    assert uneven.labeled_fraction == (0.55,) * 2 + (0.05,) * 18
    assert settings("fedsiam_cifar10", "d,small,split=noniid1,variant=released").data.num_clients == 100
    with pytest.raises(ValueError, match=r"^the config's argument clients: got '10' with small, accepted: without it$"):
        settings("feddure_cifar10", "small,clients=10")


def test_no_config_file_is_left_out():
    assert FILES - {name.partition(":")[0] for name in CASES} == {"digits", "pfl_cifar10", "splits"}
    for file in FILES:
        settings(file)


def test_defaults_are_arguments_too():
    for file in sorted(f for f in FILES if f.startswith("fl2_")):
        assert settings(file) == settings(file, "paper,split=iid") == settings(file, "method=fl2")
        assert settings(file) != settings(file, "released")
    for dataset, labels in (("cifar10", 4000), ("cifar100", 10000), ("svhn", 1000)):
        assert settings(f"semifl_{dataset}") == settings(f"semifl_{dataset}", f"paper,labels={labels},split=iid")


def test_the_datasets_own_views_and_normalization_are_semifls():
    cifar10, cifar100, svhn = (DATASETS[name] for name in ("cifar10", "cifar100", "svhn_cropped"))
    assert (cifar10.weak, cifar100.weak, svhn.weak) == ("flip_crop4", "flip_crop4", "crop4")
    assert (cifar100.mean, cifar100.std) == ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
    assert (svhn.mean, svhn.std) == ((0.4377, 0.4438, 0.4728), (0.198, 0.201, 0.197))


@pytest.mark.parametrize("method", METHODS)
def test_digits_takes_every_method(method):
    ours = {"model.name": "cnn", "data.name": "digits", "data.num_clients": 20, "rounds": 40, "cohort_size": 5}
    ours |= {"method.name": method, "method.prox_mu": 0.01 if method == "fedprox" else 0.0}
    if method in ("fl2", "fixmatch"):
        ours |= {"method.batches": "accepted", "server.training.pretrain": 10 if method == "fl2" else 0}
        for holder in ("client", "server.training"):
            own = {"schedule": "constant", "clip_norm": 1.0, "learning_rate": 0.03}
            ours |= {f"{holder}.optimizer.{key}": value for key, value in own.items()}
    if method not in (*common.WITHOUT_CLIENTS, *common.LABELS_AT_SOME_CLIENTS):
        split = {"data.num_labels": 10, "data.partition": "dirichlet", "data.alpha": 0.3}
        check(settings("digits", f"{method},labels=10,split=dir0.3"), ours | split)
    at_server = {"data.labels_at": "server", "data.num_labels": 40, "data.labeled_fraction": ()}
    at_clients = {"data.labels_at": "clients", "data.labeled_fraction": (0.1,)}
    places = tiny.LABELS_AT.get(method, ("server",))
    default = "server" if "server" in places and method not in common.ON_ALL_LABELS else places[0]
    for argument, place in ((method, default), *((f"{method},labels_at={place}", place) for place in places)):
        expected = {"server": at_server, "clients": at_clients}.get(
            place, {"data.labels_at": place, "data.labeled_clients": (0.2,)}
        )
        revealed = place == "server" and method in common.ON_ALL_LABELS
        check(settings("digits", argument), {"data.partition": "iid", "data.reveal_labels": revealed} | expected)


@pytest.mark.parametrize("method", common.LABELS_AT_CLIENTS)
def test_every_method_that_reads_labels_at_the_clients_has_a_config_in_feddures_setting(method):
    own = {"fedprox": ("prox_mu", 0.01), "fedsem": ("labeled_rounds", 0.6), "fedtrinet": ("labeled_rounds", 0.4)}
    key, number = own.get(method, ("name", method))
    expected = TABLES["FEDDURE_SETTING"] | TABLES["DIR_DIR"] | {"method.name": method, f"method.{key}": number}
    check(settings("feddure_cifar10", f"{method},split=dir_dir"), expected)


FEDDURE_SPLITS = [("iid_iid", 0.5), ("iid_dir", 0.3), ("dir_dir", 0.3), ("dir_dir", 0.5)]


@pytest.mark.parametrize(
    ("dataset", "examples", "split", "gamma"),
    [
        *(("cifar10", 50_000, *of) for of in FEDDURE_SPLITS),
        *(("cinic10", 90_000, *of) for of in FEDDURE_SPLITS),
        ("fashion_mnist", 60_000, "dir_dir", 0.3),
    ],
)
def test_every_share_of_feddures_labels_can_be_drawn(dataset, examples, split, gamma):
    """2 to 20 % of the training examples; at 2 % no more than one label at every client is asked for."""
    labels = np.random.default_rng(0).permutation(np.arange(examples) % 10)
    for share in (0.02, 0.04, 0.1, 0.15, 0.2):
        given = settings(f"feddure_{dataset}", f"split={split},labels={round(share * examples)},gamma={gamma}")
        holdings = draw(labels_alone(labels, 10), given.data, 0)
        least = 1 if split == "dir_dir" and share == 0.02 else 10
        assert given.data.min_size == least
        assert sum(map(len, holdings.labeled)) == round(share * examples)
        assert min(map(len, (*holdings.labeled, *holdings.unlabeled))) >= least


@pytest.mark.parametrize("place", ["clients", "server"])
@pytest.mark.parametrize("file", ["fedsiam_mnist", "fedsiam_cifar10", "fedsiam_svhn"])
def test_the_curve_of_fedsiam_d_saves_the_share_of_layers_that_is_asked_for(file, place):
    """Over a whole run, to within a round: that at an end of the curve, and what is cut."""
    run = settings(file, f"d,labels_at={place}")
    options = run.method.for_rounds(run.rounds)
    shares = upload_share(options, run.rounds, jnp.arange(1, run.rounds + 1))
    np.testing.assert_allclose(jnp.sum(shares), (1 - options.saved) * run.rounds, atol=1)
