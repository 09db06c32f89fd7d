"""A sweep's table, from a file and from a command line, and the programs that its cells share."""

import pytest

from fedjax_ssl.options import parse
from fedjax_ssl.runs.sweep import Table, from_words
from fedjax_ssl.runs.sweep_programs import programs
from launch import config_file
from launch.sweep import settings_of


def test_columns_of_the_command_line_are_told_apart_and_its_title_says_what_is_compared():
    def made(*keys, config="digits:fl2", methods=""):
        return from_words(config, methods, keys)

    table = made(
        *("client.optimizer.learning_rate=.01", "server.optimizer.learning_rate=1,.5", "data.num_labels=10"),
        config="digits:{method}",
        methods="fl2,uda",
    )
    rates = [
        f"client.optimizer.learning_rate=.01, server.optimizer.learning_rate={rate}, num_labels=10" for rate in ("1", ".5")
    ]
    assert [*table.columns] == rates
    keys = "client.optimizer.learning_rate: .01; server.optimizer.learning_rate: 1, .5; data.num_labels: 10"
    assert table.about == f"method: fl2, uda; {keys} (digits:{{method}})"
    one = made("client.optimizer.learning_rate=.1,.2")
    assert [*one.columns] == ["learning_rate=.1", "learning_rate=.2"]
    assert one.about == "client.optimizer.learning_rate: .1, .2 (digits:fl2)"


def cells_of(*columns, config="digits:fl2", **overrides):
    """Cells that differ in what the columns set."""
    spec = {"config": config, "set": overrides, "columns": {str(i): {"set": of} for i, of in enumerate(columns)}}
    return [cell._replace(settings=settings_of(cell, {})) for cell in parse(Table, spec).cells()]


RATE, ALPHA = "client.optimizer.learning_rate", "data.alpha"


@pytest.mark.parametrize(
    ("columns", "least", "expected"),
    [
        ([{RATE: 0.1}, {RATE: 0.2}, {RATE: 0.3}], 1, ["012"]),
        ([{RATE: 0.1}, {RATE: 0.2}, {RATE: 0.3}], 2, ["0", "12"]),  # so that both GPUs have work
        ([{RATE: 0.1}, {RATE: 0.2}, {RATE: 0.3}], 5, ["0", "1", "2"]),
        ([{RATE: 0.1, "client.epochs": 2}, {RATE: 0.2}], 1, ["0", "1"]),  # they differ in something else, too
        ([{"client.epochs": 2}, {"client.epochs": 3}], 1, ["0", "1"]),  # no number of a program
        ([{"client.optimizer.momentum": 0.0}, {"client.optimizer.momentum": 0.5}], 1, ["0", "1"]),  # 0 is another program
        ([{RATE: r, ALPHA: a} for r in (0.1, 0.2) for a in (0.3, 0.5, 1.0)], 1, ["012", "345"]),
    ],
)
def test_cells_that_differ_in_one_number_share_a_program(columns, least, expected):
    found = programs(cells_of(*columns), least)
    assert ["".join(cell.name for cell in one.cells) for one in found] == expected


def test_what_a_small_sweep_sets_is_added(tmp_path):
    file = tmp_path / "table.toml"
    file.write_text(
        'config = "digits:{row}"\nrows = ["fl2", "uda"]\nset = { rounds = 50, eval_every = 5 }\n'
        '[small]\nrows = ["fl2"]\nset = { rounds = 2 }\n'
    )
    (cell,) = config_file.sweep(str(file), small=True).cells()
    assert (cell.row, cell.overrides) == ("fl2", {"rounds": 2, "eval_every": 5})


def test_a_number_that_is_a_configs_argument_is_shared_too():
    table = config_file.sweep("fedlabel_beta", small=False)
    cells = [cell._replace(settings=settings_of(cell, {})) for cell in table.cells()]
    found = programs(cells, 1)
    assert sorted(len(one.cells) for one in found) == [1, 1, 9, 9]  # beta = 0 alone
    assert {one.vary for one in found} == {"", "method.confidence"}


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
    assert [(cell.config, cell.paper) for cell in parse(Table, spec).cells()] == [
        ("fedsiam_mnist:d,gamma=0.1,split=iid", ""),
        ("fedsiam_svhn:d,gamma=0.2,split=iid", "88.76"),
        ("fedsiam_mnist:pi,gamma=0.1,split=iid", ""),
        ("fedsiam_svhn:pi,gamma=0.2,split=iid", ""),
    ]
