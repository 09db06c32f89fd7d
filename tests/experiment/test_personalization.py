"""Clients' own test examples, the global model's accuracy on them, and that of the models that clients train of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from fedjax_ssl.data import sources
from fedjax_ssl.experiment import evaluation, personalization
from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.personalization import personalized
from launch import evaluate
from tests import engine, tiny
from tests.commands import refused, rows, succeeded

HELD_OUT = {"data__client_test_fraction": 0.25}


def of_client(table, client):
    return np.asarray(table.index[client][: table.count[client]])


@pytest.mark.parametrize(
    "options",
    [
        {"labels_at": "server"},
        {"labels_at": "clients"},
        {"labels_at": "clients", "data__labeled_fraction": ()},
        {"labels_at": "server", "data__validation": "pool"},
        {"labels_at": "server", "data__exclude_labeled": False},
    ],
    ids=str,
)
def test_a_quarter_of_each_clients_examples_is_in_no_table_that_anybody_trains_on(options):
    with_tests = tiny.experiment("fixmatch", **options, **HELD_OUT).problem.data
    without = tiny.experiment("fixmatch", **options).problem.data
    held = np.concatenate([of_client(with_tests.client_test, k) for k in range(8)])
    assert len(np.unique(held)) == len(held) > 0
    tables = [with_tests.server, with_tests.labeled, with_tests.unlabeled, with_tests.client_data, with_tests.pooled]
    tables += [with_tests.validation] if with_tests.validation else []
    for table in tables:
        seen = np.concatenate([of_client(table, k) for k in range(len(table.count))])
        assert not np.isin(held, seen).any()
    labeled = np.concatenate([of_client(without.server, 0), *(of_client(without.labeled, k) for k in range(8))])
    for k in range(8):
        own = of_client(without.client_data, k)
        free = (
            own
            if options["labels_at"] == "clients" and "data__labeled_fraction" not in options
            else own[~np.isin(own, labeled)]
        )
        tests = of_client(with_tests.client_test, k)
        assert np.isin(tests, free).all()
        assert len(tests) == int(0.25 * len(free) + 0.5)


WRITERS = np.array(["ann", "bob", "eve"])  # whose examples they are, in the sorted order in which clients are numbered


def own_arrays(keys):
    """Random images of three writers, of whom the test part has another one, too."""
    rng = np.random.default_rng(0)
    train, test = WRITERS[np.arange(90) % 3], np.array(["eve", "ann", "zoe", "eve"])
    images, labels = rng.integers(0, 256, (90, 8, 8), np.uint8), np.arange(90, dtype=np.int32) // 3 % 4
    return dict(zip(keys, (images, labels, images[:4] // 2, labels[6:10], train, test), strict=True))


@pytest.mark.parametrize("kind", ["arrays", "npz", "image_folder", "parquet", "resplit"])
def test_the_test_part_may_say_whose_its_examples_are(kind, tmp_path):
    data = {"num_clients": 3, "num_labels": 4, "partition": "natural", "client_test": "own", "validation": "pool"}
    dataset = None
    if kind == "arrays":
        keys = ("train_images", "train_labels", "test_images", "test_labels", "clients", "test_clients")
        dataset = sources.from_arrays(**own_arrays(keys))
    elif kind in ("npz", "resplit"):
        path = tmp_path / "own.npz"
        np.savez(path, **own_arrays(("x_train", "y_train", "x_test", "y_test", "client", "client_test")))
        data |= {"name": "npz", "path": str(path)}
    else:
        images, labels, test_images, test_labels, train, test = own_arrays("abcdef").values()
        parts = {"train": (images, labels, train), "test": (test_images, test_labels, test)}
        data |= {"name": kind, "path": str(tmp_path), "data_dir": str(tmp_path / "kept")}
        if kind == "parquet":
            datasets = pytest.importorskip("datasets")
            for split, (x, y, whose) in parts.items():
                rows = {"image": [Image.fromarray(one) for one in x], "label": y, "writer": whose}
                datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).to_parquet(
                    tmp_path / f"{split}.parquet"
                )
            data["client_column"] = "writer"
        else:
            for split, (x, y, whose) in parts.items():
                (tmp_path / split).mkdir()
                for i, one in enumerate(x):
                    Image.fromarray(one).save(tmp_path / split / f"{i}.png")
                lines = [f"{i},{y[i]},{whose[i]}" for i in range(len(x))]
                (tmp_path / f"{split}.csv").write_text("\n".join(["id,label,client", *lines, ""]))
    if kind == "resplit":
        data |= {"resplit": (0.8, 0.0, 0.2), "num_clients": 4}
    found = build(tiny.config("fedavg", cohort_size=3, **{f"data__{key}": one for key, one in data.items()}), dataset)
    table, train = found.problem.data.client_test, found.problem.train
    rows = [of_client(table, k) for k in range(data["num_clients"])]
    at = [row - (len(train.labels) - len(found.dataset.test_labels)) for row in rows]
    if kind == "resplit":  # every example of a writer is either test or training data
        assert sorted(np.concatenate(at)) == list(range(len(found.dataset.test_labels)))
    else:
        assert [row.tolist() for row in at] == [[1], [], [0, 3]]
    for row, own in zip(rows, at, strict=True):
        np.testing.assert_array_equal(train.images[row], found.dataset.test_images[own])
        np.testing.assert_array_equal(train.labels[row], found.dataset.test_labels[own])
    held = np.concatenate([*rows, of_client(found.problem.data.validation, 0)])
    for name in ("server", "labeled", "unlabeled", "client_data", "pooled"):
        own = getattr(found.problem.data, name)
        assert not np.isin(held, np.concatenate([of_client(own, k) for k in range(len(own.count))])).any()


@pytest.fixture(scope="module")
def linear():
    """Softmax regression that clients train by one step on all of their labels in an epoch, and its state after a round."""
    plain = {"data__weak": "none", "client__batch_size": 512, "client__optimizer__momentum": 0.0, "client__epochs": 1}
    plain |= {"client__optimizer__nesterov": False, "client__optimizer__learning_rate": 0.3, "rounds": 2}
    made = tiny.experiment("fedavg", network="linear", labels_at="clients", **plain, **HELD_OUT)
    state, _ = next(made.rounds())
    return made, engine.copied(state)


def features(made, index):
    images = made.views.plain(made.problem.train.images[index])
    return np.asarray(images, np.float64).reshape(len(index), -1)


def test_a_clients_own_model_is_the_global_one_after_its_own_steps(linear):
    made, state = linear
    params = jax.device_get(state.server.weights.params["Dense_0"])
    kernel, bias, labels = np.float64(params["kernel"]), np.float64(params["bias"]), np.asarray(made.problem.train.labels)
    found = personalized(made, state, epochs=2)
    for k in range(8):
        w, b = kernel, bias
        own, tests = of_client(made.problem.data.labeled, k), of_client(made.problem.data.client_test, k)
        x, y = features(made, own), np.eye(10)[labels[own]]
        for _ in range(2):
            logits = x @ w + b
            outputs = np.exp(logits - logits.max(1, keepdims=True))
            error = (outputs / outputs.sum(1, keepdims=True) - y) / len(x)
            w, b = w - 0.3 * x.T @ error, b - 0.3 * error.sum(0)
        right = [np.argmax(features(made, tests) @ v + c, 1) == labels[tests] for v, c in ((kernel, bias), (w, b))]
        assert found.before[k] == pytest.approx(right[0].mean())
        assert found.after[k] == pytest.approx(right[1].mean())
    assert not np.array_equal(found.before, found.after)
    assert np.array_equal(personalized(made, state, epochs=2).after, found.after)


@pytest.mark.slow
@pytest.mark.parametrize("method", [pytest.param("fedmatch", marks=pytest.mark.slow), "fedtrinet"])
def test_the_network_that_a_client_uploaded_last_is_evaluated_on_its_examples(method):
    made = tiny.experiment(method, labels_at="clients", rounds=2, **tiny.confident(method), **HELD_OUT)
    *_, (state, _) = made.rounds()
    found = personalization.of_states(made, state)["last_upload"]
    weights, table = state.server.weights, made.problem.data.client_test
    for k in range(8):
        own = jax.tree.map(lambda x, k=k: x[k], state.clients)
        mine = own.last if method == "fedtrinet" else weights._replace(params=weights.params._replace(psi=own.psi))
        tests = of_client(table, k)
        as_global = state._replace(server=state.server._replace(weights=mine))
        right = made.predict(as_global, made.problem.train.images[tests]).argmax(1) == made.problem.train.labels[tests]
        assert found[k] == pytest.approx(right.mean())
    assert len({*found}) > 1


def test_personalized_models_train_at_the_rate_before_the_schedule_and_without_faults(linear):
    """A cosine schedule ends at 0, and a faulty client's update is no model of its own."""
    made, state = linear
    expected = personalized(made, state, epochs=2)
    tree = made.settings.to_dict()
    tree["client"]["optimizer"]["schedule"], tree["client"]["optimizer"]["warmup_rounds"] = "cosine", 1.0
    tree["system"]["faulty"], tree["system"]["fault_scale"] = 0.5, 3.0
    found = personalized(build(tree), state._replace(round=jnp.int32(2)), epochs=2)
    np.testing.assert_array_equal(found.after, expected.after)
    assert not np.array_equal(found.after, found.before)


@pytest.mark.parametrize(
    "where", [{"client__compression": "topk"}, pytest.param({"privacy__clip": 1e-3}, marks=pytest.mark.slow)]
)
def test_nothing_that_a_client_keeps_is_compressed_or_clipped(where):
    own = HELD_OUT | {"labels_at": "clients", "network": "linear", "rounds": 1}
    plain, sent = (tiny.experiment("fedavg", **own, **extra) for extra in ({}, where))
    (state, _), (other, _) = next(plain.rounds()), next(sent.rounds())
    expected = personalized(plain, state, epochs=2)
    found = personalized(sent, other._replace(server=state.server), epochs=2)
    np.testing.assert_array_equal(found.after, expected.after)


@pytest.mark.slow
def test_clients_without_labels_train_as_many_epochs_as_they_are_told():
    """With settings under which they train for fewer, and not yet in the first rounds."""
    own = HELD_OUT | {"labels_at": "some_clients", "network": "linear", "rounds": 1, "client__epochs": 2}
    own |= tiny.confident("fixmatch")
    plain = tiny.experiment("fixmatch", **own)
    resting = tiny.experiment("fixmatch", **own, client__unlabeled_epochs=1, client__unlabeled_wait=9)
    state, _ = next(plain.rounds())
    expected = personalized(plain, state, epochs=2)
    assert not np.array_equal(expected.before, expected.after)
    np.testing.assert_array_equal(personalized(resting, state, epochs=2).after, expected.after)


@pytest.mark.parametrize("method", [pytest.param("fedmatch", marks=pytest.mark.slow), "fedtrinet"])
def test_a_client_that_has_not_taken_part_has_no_model_of_its_own(method):
    made = tiny.experiment(method, labels_at="clients", rounds=1, cohort_size=2, network="linear", **HELD_OUT)
    state, _ = next(made.rounds())
    found = personalization.of_states(made, state)["last_upload"]
    np.testing.assert_array_equal(np.isnan(found), ~np.asarray(state.clients.seen))
    assert np.isnan(found).sum() == 6


def test_a_model_in_a_clients_state_is_evaluated_on_the_clients_examples(linear):
    """Here the state says which class the client takes everything for."""
    made, state = linear
    labels, table = np.asarray(made.problem.train.labels), made.problem.data.client_test
    guess = {"guess": lambda server, own, images, mask: jax.nn.one_hot(jnp.full(len(images), own), 10)}
    problem = made.problem
    own = problem._replace(method=lambda number: problem.method(number)._replace(predict_client=guess))
    found = personalization.of_states(
        dataclasses.replace(made, problem=own), state._replace(clients=jnp.arange(8, dtype=jnp.int32))
    )
    expected = [np.mean(labels[of_client(table, k)] == k) for k in range(8)]
    np.testing.assert_allclose(found["guess"], expected)
    assert personalization.of_states(made, state) == {}


@pytest.mark.parametrize(("strategy", "where"), [("scan", {}), ("sharded_chunked", {}), ("scan", {"on_host": True})])
def test_the_global_models_accuracy_on_each_clients_examples_is_that_of_its_predictions(linear, strategy, where):
    made, state = linear
    predicted = made.predict(state, np.asarray(made.problem.train.images)).argmax(1) == np.asarray(made.problem.train.labels)
    expected = [predicted[of_client(made.problem.data.client_test, k)].mean() for k in range(8)]
    simulator, _, _ = engine.simulate(made, strategy, rounds=0, **where)
    (found,) = simulator.client_accuracies(jax.device_put(state, simulator._where.state) if not where else state)
    np.testing.assert_allclose(found, expected)


def test_the_log_has_mean_spread_and_worst_tenth_of_the_clients(linear):
    made, _ = linear
    settings = made.settings.to_dict()
    settings["diagnostics"]["client_eval_every"] = 2
    run = build(settings)
    first, second = [row for _, row in run.rounds()]
    assert not any(key.startswith("eval/client") for key in first)
    (accuracy,) = run.simulator.client_accuracies(list(run.rounds())[-1][0])
    assert second["eval/client_accuracy"] == pytest.approx(np.mean(accuracy))
    assert second["eval/client_accuracy_sd"] == pytest.approx(np.std(accuracy))
    assert second["eval/client_accuracy_worst"] == min(accuracy)  # of eight clients one


def test_clients_without_test_examples_do_not_count():
    found = evaluation.over_clients(np.array([0.5, np.nan, 1.0]))
    assert found == {"eval/client_accuracy": 0.75, "eval/client_accuracy_sd": 0.25, "eval/client_accuracy_worst": 0.5}


def test_what_cannot_be_is_one_line(linear):
    made, state = linear
    with pytest.raises(ValueError, match=r"^personalize: got a run without data.client_test_fraction"):
        personalized(tiny.experiment("fedavg", network="linear", labels_at="clients"), state, 1)
    with pytest.raises(ValueError, match=r"^diagnostics.client_eval_every: got 2 without examples to test clients on"):
        tiny.experiment("fedavg", diagnostics__client_eval_every=2)
    with pytest.raises(ValueError, match=r"^data.client_test: got own, accepted: share, or own with data.partition=natural"):
        tiny.experiment("fedavg", data__client_test="own")
    with pytest.raises(ValueError, match=r"^data.client_test_fraction: got 0.2 with data.client_test=own, accepted: 0, or"):
        tiny.experiment("fedavg", data__client_test="own", data__client_test_fraction=0.2)
    keys = ("train_images", "train_labels", "test_images", "test_labels", "clients")
    anonymous = sources.from_arrays(**dict(list(zip(keys, own_arrays("abcdef").values(), strict=False))))
    natural = {"data__partition": "natural", "data__num_clients": 3, "data__num_labels": 4, "cohort_size": 3}
    with pytest.raises(ValueError, match=r"^data.client_test=own: the data do not say whose the test examples are"):
        build(tiny.config("fedavg", data__client_test="own", **natural), anonymous)
    with pytest.raises(ValueError, match=r"client_test_fraction=0.001 is less than one example of any client"):
        tiny.experiment("fedavg", data__client_test_fraction=0.001)
    method = made.problem.method(None)
    images = np.zeros((1, 8, 8, 1), np.uint8)
    with pytest.raises(ValueError, match="clients do not send the network that it evaluates"):
        personalization._moved(method, state.server, state.server.weights.params["Dense_0"], images)


@pytest.mark.slow
def test_evaluate_shows_and_stores_clients_own_models(tmp_path, fixmatch):
    folder = str(tmp_path / "run")
    succeeded(
        fixmatch, f"--workdir={folder}", "--config.data.client_test_fraction=.2", "--config.diagnostics.client_eval_every=3"
    )
    assert [("eval/client_accuracy" in row) for row in rows(tmp_path / "run")] == [False, False, True] * 2
    shown = succeeded(folder, "--personalize=1", "--save", fixmatch, program=evaluate).stdout
    assert "personalized mean" in shown
    assert "accuracies on clients' own test examples, after 1 epoch of their own" in shown
    assert "--personalize: got -1, accepted" in refused(folder, "--personalize=-1", program=evaluate)
