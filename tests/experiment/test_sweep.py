"""`launch.sweep`: a table of runs as a queue, that goes on where it stopped."""

import json

import pytest

from launch import command, sweep
from tests.experiment.commands import launch, refused


def test_every_sweep_that_is_known_by_name_has_configs_that_run():
    for name in sweep.names():
        for small in (False, True):
            spec = sweep._from_file(name, small)
            cells = list(sweep.cells_of(spec))
            assert len({cell.name for cell in cells}) == len(cells)
            for cell in cells:
                sweep._checked(cell, [])


@pytest.mark.ci
def test_a_table_runs_once_and_names_what_failed(tmp_path, capfd):
    file = tmp_path / "two ways.toml"
    file.write_text(
        'config = "digits:{row}"\nseeds = 2\nrows = ["supervised"]\n'
        '[set]\n"rounds" = 2\n"model.name" = "linear"\n[columns]\n'
        'plain = {}\n"lr 1e30" = { set = { "server.optimizer.learning_rate" = 1e30 } }\n'
        '[paper]\nsupervised = { plain = "12.5 ± 1.0" }\n'
    )
    arguments = [str(file), f"--workdir={tmp_path / 'out'}", "--jobs=2"]
    done = launch(*arguments, cwd=tmp_path, program=sweep)
    assert done.returncode == 1
    assert "failed: supervised lr 1e30: " in done.stderr
    header, names, supervised = done.stdout.splitlines()
    assert header == "accuracy of the last round in %, mean ± sd over 2 seeds, in brackets the paper's"
    assert names.split("  ")[-1].strip() == "lr 1e30"
    assert supervised.split()[-1] == "failed"
    assert " [12.5 ± 1.0]  " in supervised
    folders = [tmp_path / "out" / "supervised-plain" / str(seed) for seed in (0, 1)]
    accuracies = [100 * json.loads((folder / "summary.json").read_text())["eval/accuracy"] for folder in folders]
    assert f"{sum(accuracies) / 2:.1f} ± " in supervised
    other = launch(*arguments, "--config.client.epochs=2", cwd=tmp_path, program=sweep)  # another experiment in the same folder
    assert other.returncode == 1
    assert "failed: supervised plain: " in other.stderr
    assert "holds another experiment: client.epochs is" in other.stderr
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "supervised-plain").rglob("*")}
    launch(*arguments, cwd=tmp_path, program=sweep)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "supervised-plain").rglob("*")} == before
    summary = folders[1] / "summary.json"
    whole = summary.read_bytes()
    summary.write_bytes(whole.replace(b'"eval/accuracy": 0', b'"eval/accuracy": 1'))
    assert launch(*arguments, cwd=tmp_path, program=sweep).stdout == done.stdout  # its run writes the summary anew
    assert summary.read_bytes() == whole


def test_rows_and_columns_have_words_of_their_own_in_the_config():
    spec = {
        "config": "fedsiam_{data}:{row},gamma={gamma},split={column}",
        "rows": {"D": {"name": "d"}, "Pi": "pi"},
        "columns": {
            "MNIST": {"data": "mnist", "gamma": 0.1, "name": "iid"},
            "SVHN": {"data": "svhn", "gamma": 0.2, "name": "iid"},
        },
        "paper": {"D": {"SVHN": 88.76}},
    }
    assert [(cell.config, cell.paper) for cell in sweep.cells_of(spec)] == [
        ("fedsiam_mnist:d,gamma=0.1,split=iid", ""),
        ("fedsiam_svhn:d,gamma=0.2,split=iid", "88.76"),
        ("fedsiam_mnist:pi,gamma=0.1,split=iid", ""),
        ("fedsiam_svhn:pi,gamma=0.2,split=iid", ""),
    ]


def test_an_accuracy_of_a_paper_for_no_cell_is_refused(tmp_path):
    file = tmp_path / "typo.toml"
    file.write_text('config = "digits:{row}"\nrows = ["fl2"]\n[paper]\nfl = 90.0\n')
    assert "paper: got 'fl', accepted: a row, and" in refused(str(file), cwd=tmp_path, program=sweep)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "FILE or --config: missing"),
        (("nosuch",), "FILE: got nosuch, accepted: a TOML file, or one of "),
        (("--config=digits:{method}",), "--methods: got '' with --config=digits:{method}, accepted: methods"),
        (("--config=digits:{method}", "--methods=fl2,nosuch"), "the config's argument: got 'nosuch', accepted: fl2,"),
        (("--config=digits", "--set", "data.num_labels"), "--set: got data.num_labels, accepted: KEY=VALUE"),
        (("--config=digits", "--set", "data.num_label=3"), "config.data.num_label: unknown key; did you mean"),
        (("--config=digits", "--frist"), "--frist: not an argument"),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(tmp_path, words, line):
    assert line in refused(*words, cwd=tmp_path, program=sweep)
    assert not list(tmp_path.iterdir())


def test_commands_have_the_name_that_works_where_they_are():
    assert command.program("report") == "python -m launch.report"
