"""`launch.evaluate`: numbers of finished runs, by golden computations and as a person calls it."""

import csv
import json
import pathlib
import shutil

import cv2
import numpy as np
import pytest

from fedjax_ssl.experiment import export
from fedjax_ssl.files import write_json
from fedjax_ssl.report import extras
from fedjax_ssl.report.tables import DASH
from fedjax_ssl.runs import reading
from fedjax_ssl.runs.loading import load
from fedjax_ssl.runs.log import MetricsLog
from launch import evaluate, report
from tests.commands import CONFIG, launch, refused, succeeded

pytestmark = pytest.mark.usefixtures("own_methods")


SCORES = "eval_metrics=balanced_accuracy, macro_f1 auc,top5,ece"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, config):
    """Two seeds of a method of one's own, in a folder."""
    folder = tmp_path_factory.mktemp("evaluated")
    settings = ("data.name=digits", "data.num_clients=6", "rounds=2", "seeds=2", "checkpoint_every=1", SCORES)
    succeeded(config, f"--workdir={folder / 'runs'}", *(f"--config.{one}" for one in settings))
    return folder / "runs"


def evaluated(*arguments):
    done = succeeded(*map(str, arguments), "--json", program=evaluate)
    return json.loads(done.stdout)


def test_a_run_as_text_as_json_and_its_predictions(runs, tmp_path):
    summary = json.loads((runs / "0" / "summary.json").read_text())
    for out in (tmp_path / "p.csv", tmp_path / "p.npz"):
        (report,) = evaluated(runs / "0", "--clients", f"--out={out}")["runs"].values()
    assert report["accuracy"] == pytest.approx(summary["eval/accuracy"])
    assert (report["round"], report["examples"], np.sum(report["confusion"])) == (2, 360, 360)
    assert len(report["clients"]["accuracy"]) == 6
    assert report["clients"]["worst"] == min(report["clients"]["accuracy"])
    with np.load(tmp_path / "p.npz") as archive, (tmp_path / "p.csv").open() as file:
        table = list(csv.DictReader(file))
        for name in ("id", "prediction", "confidence", "label"):
            np.testing.assert_allclose([float(row[name]) for row in table], archive[name])
        assert np.mean(archive["prediction"] == archive["label"]) == pytest.approx(summary["eval/accuracy"])
    shown = launch(str(runs), "--clients", program=evaluate).stdout
    (line,) = (line for line in shown.splitlines() if line.startswith(f"{runs / '0'}  "))
    keys = ("accuracy", "balanced_accuracy", "macro_f1", "auc", "top5_accuracy", "ece")
    numbers = [*(report[key] for key in keys), report["clients"]["mean"], report["clients"]["worst"]]
    assert line.split()[1:] == ["2", "360", *(f"{number:.4f}" for number in numbers)]
    for words in (f"{runs}: mean ± sd", "confusion matrix", "accuracies on clients' own training examples"):
        assert words in shown


def test_the_log_has_the_same_scores_at_each_evaluation(runs):
    for folder, found in evaluated(runs)["runs"].items():
        rows = MetricsLog(pathlib.Path(folder)).rows()
        last = {key.removeprefix("eval/"): value for key, value in rows[-1].items() if key.startswith("eval/")}
        del last["loss"]
        assert last.keys() == {"accuracy", "balanced_accuracy", "macro_f1", "auc", "top5_accuracy", "ece"}
        assert last == pytest.approx({key: found[key] for key in last}, rel=1e-5)


def test_seeds_have_mean_and_standard_deviation(runs):
    found = evaluated(runs)
    accuracies = [report["accuracy"] for report in found["runs"].values()]
    assert found["all"][str(runs)]["accuracy"] == {
        "mean": pytest.approx(np.mean(accuracies)),
        "sd": pytest.approx(np.std(accuracies, ddof=1)),
    }
    assert len(found["all"][str(runs)]["class_accuracy"]) == 10
    assert 0.5 < found["all"][str(runs)]["auc"]["mean"] < 1
    assert "confusion" not in found["all"][str(runs)]


@pytest.mark.ci
def test_runs_of_several_values_are_several_means(config, tmp_path):
    several = ("--config.seeds=2", "--config.vary=method.scale", "--config.values=.5,1", "--config.rounds=2")
    succeeded(config, "--config.data.name=digits", *several, f"--workdir={tmp_path}")
    found = evaluated(tmp_path)
    assert len(found["runs"]) == 4
    assert [*found["all"]] == [f"{tmp_path}/0-scale={one}, {tmp_path}/1-scale={one}" for one in ("0.5", "1.0")]


def test_an_older_state_is_evaluated_with_a_warning_and_no_other(runs, tmp_path):
    folder = shutil.copytree(runs / "0", tmp_path / "run")
    newest = folder / "checkpoints" / "2"
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(b"")
    (line,) = launch(str(folder), program=evaluate).stderr.splitlines()
    assert line.startswith(f"skipped corrupt checkpoint {newest}: ")


def test_runs_at_any_depth_are_saved_for_a_report_each_with_those_beside_it(runs, tmp_path):
    sweep = shutil.copytree(runs, tmp_path / "sweep" / "fl2").parent
    shutil.copytree(runs / "0", sweep / "fixmatch" / "0")
    found = evaluated(sweep, "--save")
    assert [*found["runs"]] == [str(sweep / name) for name in ("fixmatch/0", "fl2/0", "fl2/1")]
    assert [*found["all"]] == [str(sweep / "fl2")]
    for run in reading.find([sweep]).runs:
        saved, problems = extras.evaluation(run)
        assert problems == []
        assert saved.confusion.tolist() == found["runs"][str(run.path)]["confusion"]
        assert all(value == found["runs"][str(run.path)][key] for key, value in saved.scores.items())


def test_a_run_that_has_diverged_is_in_no_mean(runs, tmp_path):
    both = shutil.copytree(runs, tmp_path / "both")
    write_json(both / "1" / "diverged.json", {"round": 3, "diverged": "round 3: client/loss is NaN"})
    done = succeeded(str(both), "--json", program=evaluate)
    found = json.loads(done.stdout)
    assert (len(found["runs"]), found["all"]) == (2, {})
    assert done.stderr == f"{both / '1'} has diverged: this is its checkpoint of round 2, which no mean has\n"


def test_a_run_that_cannot_be_loaded_is_left_out_and_said_and_alone_it_is_refused(runs, tmp_path):
    damaged = shutil.copytree(runs / "1", tmp_path / "1")
    shutil.rmtree(damaged / "checkpoints")
    line = f"workdir: got {damaged}, which has no checkpoint, accepted: the folder of a run that has one"
    done = succeeded(str(damaged), str(runs / "0"), program=evaluate)
    assert done.stderr == f"left out: {line}\n"
    assert str(runs / "0") in done.stdout
    alone = launch(str(damaged), program=evaluate)
    assert (alone.returncode, alone.stderr) == (2, f"error: {line}\n")


def test_other_data_from_a_file_and_from_a_folder(runs, tmp_path):
    experiment, state = load(runs / "0")
    images, labels = (np.asarray(x)[:40] for x in experiment.problem.test)
    right = np.mean(experiment.predict(state, images).argmax(1) == labels)
    np.savez(tmp_path / "labeled.npz", x_test=images[..., 0], y_test=labels)
    np.savez(tmp_path / "bare.npz", images=images)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        (tmp_path / "classes" / str(label)).mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(tmp_path / "classes" / str(label) / f"{i}.png"), image)
    for name in ("labeled.npz", "classes"):
        (report,) = evaluated(runs / "0", f"--data={tmp_path / name}")["runs"].values()
        assert (report["accuracy"], report["examples"]) == (pytest.approx(right), 40)
    (report,) = evaluated(runs / "0", f"--data={tmp_path / 'bare.npz'}")["runs"].values()
    assert report == {"round": 2, "examples": 40}
    np.savez(tmp_path / "one.npz", x_test=images[:1, ..., 0], y_test=labels[:1])  # nine classes have no examples
    done = launch(str(runs), f"--data={tmp_path / 'one.npz'}", program=evaluate)
    assert (done.returncode, done.stdout.count(DASH)) == (0, 18)
    assert evaluated(runs, f"--data={tmp_path / 'one.npz'}")["all"][str(runs)]["accuracy"]["mean"] in (0, 0.5, 1)


NAMES = ["ant", "bee, wild", "$c"]


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """A folder with images of named classes in color, `data`, and a run of them, `run`."""
    root, pixels = tmp_path_factory.mktemp("named"), np.random.default_rng(0).integers(0, 256, (36, 8, 8, 3), np.uint8)
    for i, image in enumerate(pixels):
        folder = root / "data" / ("train" if i < 24 else "test") / NAMES[i % 3]
        folder.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / f"{i}.png"), image)
    data = (f"data.path={root / 'data'}", "data.name=image_folder", "data.num_clients=6", "data.num_labels=6", "rounds=1")
    (root / "small.py").write_text(CONFIG)
    succeeded(f"--config={root / 'small.py'}", f"--workdir={root / 'run'}", *(f"--config.{one}" for one in data))
    return root


@pytest.mark.ci
def test_names_of_classes_are_shown_and_stored(named, tmp_path):
    run, out = named / "run", tmp_path / "p.csv"
    experiment, _ = load(run)
    assert (experiment.classes, export.metadata(experiment)["classes"]) == (("$c", "ant", "bee, wild"), sorted(NAMES))
    heads = ["0 = $c", "1 = ant", "2 = bee, wild"]
    shown = launch(str(run), f"--out={out}", "--save", program=evaluate).stdout
    assert [line.split("  ")[0] for line in shown.splitlines() if " = " in line] == heads
    with out.open() as file:
        table = list(csv.DictReader(file))
    files = [str(file.relative_to(named / "data")) for file in sorted((named / "data" / "test").glob("*/*.png"))]
    assert [row["file"] for row in table] == files
    assert [row["predicted_class"] for row in table] == [sorted(NAMES)[int(row["prediction"])] for row in table]
    assert evaluated(run)["runs"][str(run)]["classes"] == sorted(NAMES)
    succeeded(str(run), f"--out={tmp_path / 'report.html'}", program=report)
    with (tmp_path / "report_files" / "per_class.csv").open() as file:
        assert [row[0] for row in csv.reader(file)][1:] == heads


@pytest.mark.ci
def test_labels_of_other_data_are_matched_by_names(named, tmp_path):
    run, test = named / "run", named / "data" / "test"
    files = sorted(test.glob("*/*.png"))
    truth = [sorted(NAMES).index(file.parent.name) for file in files]

    def labels(where):
        out = tmp_path / "p.csv"
        launch(str(run), f"--data={where}", f"--out={out}", program=evaluate)
        with out.open() as file:
            rows = list(csv.DictReader(file))
        return [int(row["label"]) for row in rows], [row.get("file") for row in rows]

    assert labels(test) == (truth, [str(file.relative_to(test)) for file in files])
    some = shutil.copytree(test, tmp_path / "some", ignore=shutil.ignore_patterns("$c"))
    assert labels(some)[0] == [label for label in truth if label]
    images = np.stack([cv2.imread(str(file))[..., ::-1] for file in files])
    order = [2, 0, 1]  # the place of each class in the file's own order
    own = {"images": images, "classes": [sorted(NAMES)[order.index(i)] for i in range(3)]}
    np.savez(tmp_path / "own.npz", labels=np.array(order)[truth], **own)
    assert labels(tmp_path / "own.npz")[0] == truth
    (flat := tmp_path / "flat").mkdir()
    for i, image in enumerate(images):
        cv2.imwrite(str(flat / f"{i:02}.png"), image[..., 0])  # gray
    assert labels(flat) == ([-1] * 12, [f"{i:02}.png" for i in range(12)])
    names = [
        f"{i:02},{file.parent.name}" if "," not in file.parent.name else f'{i:02},"bee, wild"' for i, file in enumerate(files)
    ]
    (flat / "labels.csv").write_text("\n".join(["id,label", *names]))
    assert labels(flat)[0] == truth
    np.savez(tmp_path / "below.npz", images=images, labels=np.full(12, -2))
    assert "below.npz with label -2, accepted: 0 to 2, or -1" in refused(
        str(run), f"--data={tmp_path / 'below.npz'}", program=evaluate
    )
    (some / "ant").rename(some / "dog")
    line = f"--data: got {some} with class dog, accepted: 0 = $c, 1 = ant, 2 = bee, wild"
    assert refused(str(run), f"--data={some}", program=evaluate) == f"error: {line}\n"


def test_a_method_of_ones_own_needs_its_config(tmp_path):
    text = CONFIG.replace("average.register()", "average.register('own')").replace('"average"', '"own"')
    (tmp_path / "small.py").write_text(text)
    config = f"--config={tmp_path / 'small.py'}"
    succeeded(config, f"--workdir={tmp_path / 'run'}", "--config.rounds=1")
    from fedjax_ssl.methods import METHODS

    del METHODS["own"]
    assert "method.name: got own" in refused(str(tmp_path / "run"), program=evaluate)
    assert evaluated(tmp_path / "run", config)["runs"]
