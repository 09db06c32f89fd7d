"""Wrong options of all methods: one line that names the key, what was got and what is accepted."""

import contextlib

import pydantic
import pytest

from fedjax_ssl.methods import METHODS, options_class
from tests import toy
from tests.data.common import message_of

WEIGHT, RATE, POSITIVE = "a number >= 0", "a number > 0", "a whole number >= 1"
RANGES = {
    WEIGHT: "fl2.rho=-0.1 fixmatch.unlabeled_weight=-1.0 fedmatch.lambda_l2=-1.0 fedlabel.consistency_weight=-1.0 "
    "fedlabel.burn_in=-1.0 fedsiam_d.pi_rounds=-1.0 freematch_central.fairness_weight=-0.1",
    RATE: "semifl.mixup_alpha=0.0 uda.temperature=0.0 feddure.eta_s=0.0 feddure.eta_w=-1.0 fedlabel.unlabeled_rate=0.0 "
    "fedsem.labeled_rounds=0.0 fedtrinet.labeled_rounds=0.0",
    POSITIVE: "fedmatch.helpers=0 fedmatch.helper_period=0 fedcon.ramp_rounds=0",
    "a number >= 0, at most 1e+38": "fl2.rho=1e39",
    "a number > 0, at least 1e-37": "uda.temperature=1e-38",
    "a whole number >= 1, at most 2147483647": "fedmatch.helpers=2147483648",
    "a whole number >= 1 and <= 10000000": "fedlabel.unlabeled_steps=0",
    "a whole number >= 1 and <= 1000": "fedsiam_pi.labeled_repeats=0 fedsem.labeled_repeats=1001 fixmatch_central.mu=0",
    "a whole number >= 0 and <= 1000000": "fixmatch.unlabeled_batch_size=-1 fedcon.head_hidden=1000001 "
    "feddure.unlabeled_batch_size=-1",
    "a number in [0, 1]": "semifl.confidence=1.5 uda.confidence=nan fedmatch.confidence=1.5 fedcon.target_decay=1.5 "
    "fedcon.teacher_rate=-0.1 fedsiam_d.saved=1.5",
    "a number in [0, 1)": "fixmatch_central.ema_decay=1.0 freematch_central.threshold_decay=1.0",
    "a number in (0, 1]": "freematch_central.largest_threshold=0.0",
    "a number in (0, 1)": "fedsiam_mt.alpha_max=1.0",
    "true or false": "fixmatch.strict=yes",
    "cat, fixed": "fl2.threshold=adaptive",
    "global, local": "semifl.pseudo_labels=batch",
    "global, local (did you mean 'local'?)": "fixmatch.pseudo_labels=locl",
    "used, batch": "fixmatch.divisor=all fedlabel.divisor=passing fedsiam_d.divisor=paper",
    "both, no_c, no_f": "feddure.regulators=none",
    "variance, entropy": "fedlabel.measure=var",
    "both, local, global": "fedlabel.experts=none",
    "mse, kl": "fedsiam_pi.consistency=l1",
}
"""What is accepted -> values that are not, as method.key=value."""
RECTANGLE = {"curve": "rectangle"}
PHASES = ("fedsem.labeled_rounds", "fedtrinet.labeled_rounds", "fedsiam_d.pi_rounds", "fedlabel.burn_in")
TOGETHER = [
    ("semifl", {"pseudo_labels": "local"}, "mix: got 'mixup' with method.pseudo_labels=local, accepted: none"),
    ("fixmatch", {"pseudo_labels": "local", "batches": "accepted"},
     "batches: got 'accepted' with method.pseudo_labels=local, accepted: all"),
    ("fedlabel", {"burn_in": 4.0}, "burn_in: got 4, accepted: a number <= 3, with rounds = 4"),
    ("fedtrinet", {"labeled_rounds": 4.0}, "labeled_rounds: got 4, accepted: a number <= 3, with rounds = 4"),
    ("fedsem", {"labeled_rounds": 1.5},
     "labeled_rounds: got 1.5, accepted: a share of rounds below 1, or a whole number of rounds"),
    ("fedsiam_d", {"pi_rounds": 4.0}, "pi_rounds: got 4, accepted: a number <= 3, with rounds = 4"),
    ("fedsiam_d", RECTANGLE | {"end_round": 6.0}, "end_round: got 6, accepted: a number <= 5, with rounds = 4"),
    ("fedsiam_d", RECTANGLE | {"pi_rounds": 4.0, "end_round": 4.0, "saved": 1.0},
     "end_round: got 4, accepted: a number >= method.pi_rounds + (1 - method.saved) rounds = 4, and > method.pi_rounds, where "
     "method.curve=rectangle"),
]  # fmt: skip


def parsed(text):
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


@pytest.mark.parametrize(("word", "accepted"), [(word, accepted) for accepted, all_ in RANGES.items() for word in all_.split()])
def test_a_value_out_of_its_range_is_named(word, accepted):
    (method, key), value = word.split("=")[0].split("."), parsed(word.split("=")[1])
    said = message_of(ValueError, toy.options, options_class(METHODS[method]), **{key: value})
    assert said == f"method.{key}: got {value!r}, accepted: {accepted}"


@pytest.mark.parametrize(("method", "values", "message"), TOGETHER)
def test_values_that_exclude_each_other_or_the_runs_length_are_named(method, values, message):
    said = message_of(ValueError, toy.options, options_class(METHODS[method]), rounds=4, **values)
    assert said == f"method.{message}"


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("share", [0.001, 0.06, 0.5, 0.6, 0.999])
@pytest.mark.parametrize("key", PHASES)
def test_a_share_of_few_rounds_is_a_phase_of_one_round_at_least(key, share, rounds):
    method, name = key.split(".")
    phase = getattr(toy.options(options_class(METHODS[method]), rounds=rounds, **{name: share}), name)
    assert phase == min(max(round(share * rounds), 1), max(rounds - 1, 1))


def test_a_phase_that_is_a_number_of_rounds_may_be_all_of_one_round_and_no_share_is_no_phase():
    for given, rounds, phase in [(1.0, 1, 1), (1.0, 2, 1), (0.0, 1, 0), (0.0, 3, 0)]:
        assert toy.options(options_class(METHODS["fedsiam_d"]), rounds=rounds, pi_rounds=given).pi_rounds == phase


@pytest.mark.parametrize("method", METHODS)
def test_unknown_options_and_later_changes_are_refused(method):
    kind = options_class(METHODS[method])
    with pytest.raises(ValueError, match=r"^method\.confidnce: unknown key; "):
        toy.options(kind, confidnce=0.5)
    for name in kind.model_fields:
        with pytest.raises(pydantic.ValidationError, match="frozen"):
            setattr(kind(), name, 0)
