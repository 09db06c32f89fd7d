"""Uneven clients as a user runs them: keys and files on a command line, and a report against simulated time."""

import functools

import pytest

import fedjax_ssl
from fedjax_ssl.files import read_json, write_json
from launch import evaluate, report
from tests.commands import launch, refused, rows, succeeded

pytestmark = [pytest.mark.reliability, pytest.mark.usefixtures("own_methods")]


@pytest.mark.ci
def test_a_run_with_uneven_clients_is_reported_against_simulated_time(tmp_path, config):
    (tmp_path / "rates.csv").write_text(
        "client,examples_per_s,up_bytes_per_s,down_bytes_per_s\n" + "".join(f"{k},{10 + k},4,8\n" for k in range(6))
    )
    (tmp_path / "trace.csv").write_text("client,start,end\n" + "".join(f"{k},0,{600 * (k + 1)}\n" for k in range(6)))
    keys = {"file": tmp_path / "rates.csv", "trace": tmp_path / "trace.csv", "participation": "available", "dropout": 0.3}
    system = [f"--config.system.{key}={value}" for key, value in keys.items()]
    succeeded(config, *system, f"--workdir={tmp_path / 'run'}")
    logged = rows(tmp_path / "run")
    # A client sends 4 bytes at 4 a second.
    assert [row["sim/seconds"] for row in logged] == [float(row["client/participants"] > 0) for row in logged]
    # In round t those of clients t-1 to 5 can be reached, so from round 5 on fewer than the cohort of 3.
    drawn = [row["client/participants"] + row["sim/dropped"] for row in logged]
    assert drawn == [3, 3, 3, 3, 2, 1]
    assert sum(row["sim/dropped"] for row in logged) > 0

    # Files of clients are data: moved ones are found again, others are refused.
    moved = (tmp_path / "trace.csv").rename(tmp_path / "moved.csv")
    elsewhere = [word for word in system if "system.trace" not in word]
    arguments = (config, *elsewhere, f"--config.system.trace={moved}", f"--workdir={tmp_path / 'run'}")
    succeeded(*arguments)
    text = moved.read_text()
    moved.write_text(text.replace("5,0,3600", "5,0,3000"))
    assert "its run began with other data than these" in refused(*arguments)
    assert "system.trace is 'a file' there and 'diurnal' here" in refused(
        *arguments[:-2], "--config.system.trace=diurnal", arguments[-1]
    )

    succeeded(str(tmp_path / "run"), f"--out={tmp_path / 'report.html'}", "--x=simulated", program=report)
    assert "simulated" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "report_files" / "eval_accuracy_simulated.svg").exists()


@pytest.mark.slow
def test_a_run_is_evaluated_without_its_trace_and_goes_on_with_it_alone(tmp_path, config):
    trace, run = tmp_path / "trace.csv", tmp_path / "run"
    trace.write_text("client,start,end\n" + "".join(f"{k},0,3600\n" for k in range(6)))
    given = (config, f"--config.system.trace={trace}", f"--workdir={run}")
    launch(*given, "--stop_after=1")
    table = succeeded(str(run), program=evaluate).stdout
    text = trace.read_text()
    others = functools.partial(trace.write_text, text.replace("5,0", "5,9"))
    for change, why in ((others, "system: got other devices"), (trace.unlink, "system.trace: got")):
        change()
        assert succeeded(str(run), program=evaluate).stdout == table
        experiment, state = fedjax_ssl.load(run)
        assert experiment.settings.system.trace == str(trace)
        assert experiment.inspect(state, 2).ids.size
        with pytest.raises(ValueError, match=f"^{why}.*, accepted: ") as error:
            next(experiment.rounds(state))
        assert "\n" not in str(error.value)
        refused(*given)
    noted = read_json(run / "run.json")
    trace.write_text(text)
    assert not fedjax_ssl.load(run)[0].lacking
    write_json(run / "run.json", noted | {"data": "others", "examples": "others"})
    trace.unlink()
    assert "data: got other examples, or another split" in refused(str(run), program=evaluate)
    assert len(rows(run)) == 1
