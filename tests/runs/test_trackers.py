"""Metrics in Weights & Biases and MLflow, offline, of a run that is stopped and goes on."""

import pytest

from fedjax_ssl.experiment.build import build
from fedjax_ssl.runs import run as runs
from fedjax_ssl.runs.folder import open_workdir
from fedjax_ssl.runs.log import MetricsLog
from tests import tiny


def run_in_two_parts(folder, monkeypatch, log_to):
    for variable in ("WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    for stop_after in (2, None):
        experiment = build(tiny.config("supervised", network="linear", log_to=log_to))
        open_workdir(folder, experiment.settings.to_dict())
        runs.run(experiment, folder, runs.Stop(), stop_after=stop_after)
    return MetricsLog(folder).rows()


@pytest.mark.ci
def test_mlflow_has_one_run_with_every_round(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking")
    rows = run_in_two_parts(tmp_path / "a run", monkeypatch, "mlflow")
    client = tracking.MlflowClient(f"sqlite:///{tmp_path / 'a run' / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("fedjax_ssl").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["client.optimizer.learning_rate"] == "0.03"
    for key in ("eval/accuracy", "server/loss"):
        history = {(metric.step, metric.value) for metric in client.get_metric_history(found.info.run_id, key)}
        assert history
        assert history == {(row["round"], row[key]) for row in rows if key in row}


@pytest.mark.ci
def test_wandb_writes_offline_below_the_folder(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    rows = run_in_two_parts(tmp_path / "a run", monkeypatch, "wandb")
    files = sorted((tmp_path / "a run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2  # of each process, with one id
    assert len({file.name for file in files}) == 1
    assert str(rows[-1]["eval/accuracy"]).encode() in files[1].read_bytes()


@pytest.mark.ci
def test_a_server_that_does_not_answer_is_one_warning_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    experiment = build(tiny.config("supervised", network="linear", log_to="mlflow"))
    open_workdir(tmp_path, experiment.settings.to_dict())
    runs.run(experiment, tmp_path, runs.Stop())
    assert runs.is_finished(tmp_path, experiment.settings.rounds)
    assert [record.message[:50] for record in caplog.records if "log_to" in record.message] == [
        "log_to: mlflow failed and gets no more metrics (AP"
    ]
