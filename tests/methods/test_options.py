"""Wrong options of all methods: one line that names the key, what was got and what is accepted."""

import pydantic
import pytest

from fedjax_ssl.methods import METHODS, options_class
from tests import tiny, toy

FRACTION, DECAY, WEIGHT, RATE = "a number in [0, 1]", "a number in [0, 1)", "a number >= 0", "a number > 0"
COUNT, POSITIVE = "a whole number >= 0", "a whole number >= 1"
RANGES = [
    ("fl2", "threshold", "adaptive", "cat, fixed"),
    ("fl2", "rho", -0.1, WEIGHT),
    ("semifl", "confidence", 1.5, FRACTION),
    ("semifl", "mixup_alpha", 0.0, RATE),
    ("semifl", "pseudo_labels", "local", "global, batch (did you mean 'global'?)"),
    ("fixmatch", "pseudo_labels", "locl", "global, local (did you mean 'local'?)"),
    ("fixmatch", "divisor", "all", "accepted, batch"),
    ("fixmatch", "strict", "yes", "true or false"),
    ("fixmatch", "unlabeled_weight", -1.0, WEIGHT),
    ("fixmatch", "unlabeled_batch_size", -1, COUNT),
    ("uda", "temperature", 0.0, RATE),
    ("uda", "confidence", float("nan"), FRACTION),
    ("uda", "tsa", "tanh", "none, linear, log, exp"),
    ("fedmatch", "confidence", 1.5, FRACTION),
    ("fedmatch", "helpers", 0, POSITIVE),
    ("fedmatch", "helper_period", 0, POSITIVE),
    ("fedmatch", "lambda_l2", -1.0, WEIGHT),
    ("fedcon", "head_hidden", -1, COUNT),
    ("fedcon", "ramp_rounds", 0, POSITIVE),
    ("fedcon", "target_decay", 1.5, FRACTION),
    ("fedcon", "teacher_rate", -0.1, FRACTION),
    ("feddure", "regulators", "none", "both, no_c, no_f"),
    ("feddure", "meta_gradient", "none", "direct, nested"),
    ("feddure", "eta_s", 0.0, RATE),
    ("feddure", "eta_w", -1.0, RATE),
    ("feddure", "unlabeled_batch_size", -1, COUNT),
    ("fedlabel", "measure", "var", "variance, entropy"),
    ("fedlabel", "experts", "none", "both, local, global"),
    ("fedlabel", "unlabeled_rate", 0.0, RATE),
    ("fedlabel", "unlabeled_steps", 0, POSITIVE),
    ("fedlabel", "consistency_weight", -1.0, WEIGHT),
    ("fedlabel", "burn_in", -1.0, WEIGHT),
    ("fedlabel", "normalize", "all", "batch, passing"),
    ("fedsiam_pi", "consistency", "l1", "mse, kl"),
    ("fedsiam_pi", "labeled_repeats", 0, POSITIVE),
    ("fedsiam_mt", "alpha_max", 1.0, "a number in (0, 1)"),
    ("fedsiam_d", "saved", 1.5, FRACTION),
    ("fedsiam_d", "pi_rounds", -1.0, WEIGHT),
    ("fedsem", "labeled_rounds", 0.0, RATE),
    ("fedsem", "labeled_repeats", 0, POSITIVE),
    ("fedtrinet", "labeled_rounds", 0.0, RATE),
    ("fixmatch_central", "mu", 0, POSITIVE),
    ("fixmatch_central", "ema_decay", 1.0, DECAY),
    ("freematch_central", "fairness_weight", -0.1, WEIGHT),
    ("freematch_central", "threshold_decay", 1.0, DECAY),
    ("freematch_central", "threshold_clip", 0.0, "a number in (0, 1]"),
]
RECTANGLE = {"curve": "rectangle"}
TOGETHER = [
    ("semifl", {"pseudo_labels": "batch"}, "method.mix: got 'mixup' with method.pseudo_labels=batch, accepted: none"),
    (
        "fixmatch",
        {"pseudo_labels": "local", "batches": "accepted"},
        "method.batches: got 'accepted' with method.pseudo_labels=local, accepted: all",
    ),
    (
        "freematch_central",
        {"least_threshold": 0.9, "most_threshold": 0.5},
        "method.least_threshold: got 0.9, accepted: a number in [0, method.most_threshold = 0.5]",
    ),
    ("fedlabel", {"burn_in": 4.0}, "method.burn_in: got 4, accepted: a number <= 3, with rounds = 4"),
    ("fedtrinet", {"labeled_rounds": 4.0}, "method.labeled_rounds: got 4, accepted: a number <= 3, with rounds = 4"),
    (
        "fedsem",
        {"labeled_rounds": 1.5},
        "method.labeled_rounds: got 1.5, accepted: a share of rounds below 1, or a whole number of rounds",
    ),
    ("fedsiam_d", {"pi_rounds": 4.0}, "method.pi_rounds: got 4, accepted: a number <= 3, with rounds = 4"),
    ("fedsiam_d", RECTANGLE | {"end_round": 6.0}, "method.end_round: got 6, accepted: a number <= 5, with rounds = 4"),
    (
        "fedsiam_d",
        RECTANGLE | {"pi_rounds": 4.0, "end_round": 4.0, "saved": 1.0},
        "method.end_round: got 4, accepted: a number >= method.pi_rounds + (1 - method.saved) rounds = 4, and > "
        "method.pi_rounds, where method.curve=rectangle",
    ),
    (
        "fedsiam_d",
        RECTANGLE | {"pi_rounds": 0.0, "end_round": 2.0, "saved": 0.25},
        "method.end_round: got 2, accepted: a number >= method.pi_rounds + (1 - method.saved) rounds = 3, and > "
        "method.pi_rounds, where method.curve=rectangle",
    ),
]


@pytest.mark.parametrize(("method", "key", "value", "accepted"), RANGES)
def test_a_value_out_of_its_range_is_named(method, key, value, accepted):
    with pytest.raises(ValueError) as error:
        toy.options(options_class(METHODS[method]), **{key: value})
    assert str(error.value) == f"method.{key}: got {value!r}, accepted: {accepted}"


@pytest.mark.parametrize(("method", "values", "message"), TOGETHER)
def test_values_that_exclude_each_other_or_the_runs_length_are_named(method, values, message):
    with pytest.raises(ValueError) as error:
        toy.options(options_class(METHODS[method]), rounds=4, **values)
    assert str(error.value) == message


@pytest.mark.parametrize("method", METHODS)
def test_unknown_options_and_later_changes_are_refused(method):
    kind = options_class(METHODS[method])
    with pytest.raises(ValueError, match=r"^method\.confidnce: unknown key; "):
        toy.options(kind, confidnce=0.5)
    for name in kind.model_fields:
        with pytest.raises(pydantic.ValidationError, match="frozen"):
            setattr(kind(), name, 0)


AT_SERVER = {"labels_at": "server", "data__reveal_labels": False}
NO_LABELS = (
    "data.labels_at: got server for clients that train on labels alone, accepted: clients, or server with "
    "data.reveal_labels=True"
)
REFUSED = [
    *((name, AT_SERVER, NO_LABELS) for name in ("fedavg", "fedavg_pp", "fedprox")),
    *(
        (name, {"server__training": "parallel"}, f"server.training: got parallel with method.name={name}, accepted: after")
        for name in ("fedcon", "fedmatch", "fedsiam_mt", "fixmatch_central")
    ),
    (
        "freematch_central",
        {"execution__data": "host"},
        "execution.data: got host with method.name=freematch_central and server.sbn_data=cohort, whose server reads all "
        "images, accepted: device",
    ),
    (
        "fedcon",
        {"network": "linear"},
        "model.name: got a network that is one classifier, with method.name=fedcon, accepted: one with layers before its "
        "classifier, such as cnn, cifar_cnn, mnist_cnn or mlp",
    ),
    ("fl2", {"method__confidence": 1.5}, "method.confidence: got 1.5, accepted: a number in [0, 1]"),
]


@pytest.mark.parametrize(("method", "settings", "message"), REFUSED)
def test_settings_that_do_not_fit_a_method_are_one_line(method, settings, message):
    with pytest.raises(ValueError) as error:
        tiny.experiment(method, **settings)
    assert str(error.value) == message
