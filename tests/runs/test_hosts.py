"""Several processes of one job, on this machine: they agree, end together, and go on in any other number."""

import json
import random
import re
import signal
import time

import jax
import pytest

from fedjax_ssl.experiment import layout
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.method import Requires
from fedjax_ssl.runs import hosts as package
from fedjax_ssl.runs.signals import BEFORE
from tests import hosts
from tests.commands import CONFIG, rows, run_at_start, succeeded, wait_for_rounds

pytestmark = [pytest.mark.reliability, pytest.mark.usefixtures("usual_signals")]
LONG = ("--config.rounds=100000", "--config.checkpoint_every=5", "--config.eval_every=100000")
FAILS_IN_PROCESS_1 = """
import functools, jax
from fedjax_ssl.methods import METHODS
from tests.average import average as usual

@functools.wraps(usual)
def failing(**given):
    def server_update(*args):
        if jax.process_index() == 1:
            raise RuntimeError("out of luck")
        return method.server_update(*args)

    method = usual(**given)
    return method._replace(server_update=server_update)
"""


def numbers(found):
    return [{key: pytest.approx(value, rel=1e-6, abs=1e-6) for key, value in row.items()} for row in found]


@pytest.mark.ci
def test_two_processes_of_two_devices_write_what_one_of_four_does(tmp_path, fixmatch):
    arguments = [fixmatch, "--config.rounds=2", f"--workdir={tmp_path / 'job'}"]
    first, second = hosts.ended(hosts.launched(2, *arguments))
    assert (first.status, second.status, second.stdout, second.stderr) == (0, 0, "", "")
    assert first.stderr.count("all 2 rounds are done") == 1
    assert json.loads((tmp_path / "job" / "summary.json").read_text())["device"].startswith("4 x ")
    succeeded(*arguments[:2], f"--workdir={tmp_path / 'whole'}")  # the tests have four devices
    assert rows(tmp_path / "job") == numbers(rows(tmp_path / "whole"))


@pytest.mark.slow
def test_a_process_that_dies_ends_the_job_with_its_name_and_any_number_of_processes_goes_on(tmp_path, config):
    arguments = [config, f"--workdir={tmp_path / 'job'}", *LONG]
    jobs = hosts.launched(2, *arguments)
    wait_for_rounds(tmp_path / "job", 8, jobs)
    jobs[1].kill()
    began = time.monotonic()
    first, second = hosts.ended(jobs)
    assert time.monotonic() - began < 60
    assert (first.status, second.status) == (1, -signal.SIGKILL)
    assert first.stderr.count("process 1 on ") == first.stderr.count("has died, without a sign of life") == 1
    assert "Traceback" not in first.stderr
    done = int(max((tmp_path / "job" / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name)).name)
    for end, (count, devices) in enumerate([(2, (3, 1)), (1, 1), (1, 3), (2, 2)], start=1):
        found = hosts.ended(hosts.launched(count, *arguments, f"--stop_after={done + 2 * end}", devices=devices))
        assert [one.status for one in found] == [0] * count, found
        assert f"going on after round {done + 2 * end - 2}" in found[0].stderr
    succeeded(*arguments[:1], f"--workdir={tmp_path / 'whole'}", *LONG, f"--stop_after={done + 8}")
    assert rows(tmp_path / "job") == numbers(rows(tmp_path / "whole"))


@pytest.mark.slow
def test_when_process_0_dies_the_others_end(tmp_path, config):
    jobs = hosts.launched(2, config, f"--workdir={tmp_path / 'job'}", *LONG)
    wait_for_rounds(tmp_path / "job", 2, jobs)
    jobs[0].kill()
    began = time.monotonic()
    _, second = hosts.ended(jobs)
    assert time.monotonic() - began < 60
    assert second.status in (1, -signal.SIGABRT)  # JAX may be faster, whose message has a stack trace
    assert "process 0 has died" in second.stderr or "leader task was preempted/died" in second.stderr


@pytest.mark.parametrize("process", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.ci)])
def test_a_signal_to_any_process_stops_all_after_the_same_round(tmp_path, config, process):
    jobs = hosts.launched(2, config, f"--workdir={tmp_path / 'job'}", *LONG)
    wait_for_rounds(tmp_path / "job", 2, jobs)
    jobs[process].send_signal(signal.SIGTERM)
    first, second = hosts.ended(jobs)
    assert (first.status, second.status) == (143, 143)
    done = len(rows(tmp_path / "job"))
    assert f"stopped after round {done} of" in first.stderr
    assert second.stderr == ""
    assert (tmp_path / "job" / "checkpoints" / str(done)).is_dir()


@pytest.mark.slow
def test_a_process_that_fails_alone_is_named_and_ends_all(tmp_path):
    path = tmp_path / "fails.py"
    path.write_text(FAILS_IN_PROCESS_1 + CONFIG.replace("average.register()", "METHODS['average'] = failing"))
    first, second = hosts.ended(hosts.launched(2, f"--config={path}", f"--workdir={tmp_path / 'job'}", *LONG))
    assert (first.status, second.status) == (1, 1)
    assert "RuntimeError: out of luck" in second.stderr
    assert "has ended with status 1" in first.stderr
    assert "Traceback" not in first.stderr


@pytest.mark.slow
def test_what_is_wrong_in_any_process_is_one_line_of_process_0(tmp_path, config):
    def refusal(*arguments, own):
        first, second = hosts.ended(hosts.launched(2, config, f"--workdir={tmp_path / 'job'}", *arguments, own=own))
        assert (first.status, second.status, second.stderr) == (2, 2, "")
        assert first.stderr.count("\n") == 1
        assert not (tmp_path / "job").exists()
        return first.stderr

    missing = "--config.data.path=/nowhere.npz"
    assert refusal("--config.data.name=npz", missing, own=()).startswith("error: data.path=/nowhere.npz")
    assert "process 1: data.path" in refusal(own=([], ["--config.data.name=npz", missing]))
    assert "client.epochs is 1 in process 0 and 2 in process 1" in refusal(own=([], ["--config.client.epochs=2"]))
    said = refusal(own=(["--config.client.on_nonfinite=stop"], ["--config.data.name=digits"]))
    for key in ("client.on_nonfinite is 'stop' in process 0 and 'skip'", "data.name is 'synthetic' in", "data is ['"):
        assert key in said
    said = refusal(own=(["--dry_run", "--stop_after=3"], ["--overwrite", "--stop_after=5"]))
    for key in ("--dry_run is True in process 0 and False", "--overwrite is False in", "--stop_after is 3 in process 0 and 5"):
        assert key in said


@pytest.mark.parametrize(
    "number", [0, pytest.param(signal.SIGINT, marks=pytest.mark.slow), pytest.param(signal.SIGTERM, marks=pytest.mark.ci)]
)
def test_a_process_that_waits_for_the_others_ends_at_a_signal_or_after_a_while_with_one_line(tmp_path, monkeypatch, number):
    patience = f"hosts.GIVEN_UP_AFTER = {600 if number else 1}"
    run_at_start(monkeypatch, tmp_path, f"from fedjax_ssl.runs import hosts\nhosts.SAID_AFTER = 0\n{patience}\n")
    words = ["launch.run", "--config=digits:fl2", f"--workdir={tmp_path / 'run'}", "--distributed"]
    words += [f"--coordinator=localhost:{hosts.free_port()}", "--num_processes=2", "--process_id=0"]
    (process,) = hosts.started([words], 1)
    assert process.stderr.readline() == "waiting for the other processes\n"
    if number:
        time.sleep(0.5)
        process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (128 + number if number else 2)
    assert errors.strip() == (
        BEFORE if number else "error: --distributed: not all processes met within 1 s; does each run, and reach --coordinator?"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, signal.SIGTERM])
def test_a_process_that_dies_or_gets_a_signal_while_they_meet_ends_all_with_a_line(tmp_path, config, monkeypatch, number):
    meets = "sys.stdout.write('meets\\n'), sys.stdout.flush(), time.sleep(4), meet()"
    dies = "if '--process_id=1' in sys.orig_argv:\n    hosts._watch = lambda *_: None\n    hosts.meet = lambda: os._exit(9)\n"
    of_process_1 = "" if number else dies  # before its first sign of life
    imports = "import os, sys, time\nfrom fedjax_ssl.runs import hosts\nmeet = hosts.meet\n"
    run_at_start(monkeypatch, tmp_path, f"{imports}hosts.meet = lambda: ({meets})\n{of_process_1}")
    jobs = hosts.launched(2, config, f"--workdir={tmp_path / 'job'}", *LONG)
    assert jobs[0].stdout.readline() == "meets\n"
    if number:
        assert jobs[1].stdout.readline() == "meets\n"
        jobs[0].send_signal(number)
    first, second = hosts.ended(jobs)
    assert (first.status, second.status) == ((128 + number, 128 + number) if number else (1, 9))
    assert (BEFORE if number else "process 1 has died") in first.stderr
    assert "Traceback" not in first.stderr + second.stderr
    assert first.stderr.count("\n") <= 3


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dies", "fails", "signal"])
def test_a_process_that_dies_or_fails_or_gets_a_signal_as_devices_start_ends_all_with_a_line(
    tmp_path, config, monkeypatch, case
):
    """Devices wait for those of all processes, which know of one another by then."""
    of_process_1 = {"dies": "os._exit(9)", "fails": "jax.config.update('jax_platforms', 'none')", "signal": "time.sleep(6)"}
    run_at_start(
        monkeypatch,
        tmp_path,
        "import os, time, jax\nfrom fedjax_ssl.runs import hosts\n"
        "initialize, meet = jax.distributed.initialize, hosts.meet\n"
        f"def later(**options):\n    initialize(**options)\n    if options['process_id']:\n        {of_process_1[case]}\n"
        "jax.distributed.initialize, hosts.meet = later, lambda: (print('begun', flush=True), meet())\n",
    )
    began = time.monotonic()
    jobs = hosts.launched(2, config, f"--workdir={tmp_path / 'job'}", *LONG)
    assert jobs[0].stdout.readline() == ("" if case == "dies" else "begun\n")  # devices wait for a process that is there
    if case == "signal":
        jobs[0].send_signal(signal.SIGTERM)
    first, second = hosts.ended(jobs)
    assert time.monotonic() - began < 90
    statuses = {"dies": (1, 9), "fails": (1, 1), "signal": (143, 143)}
    assert (first.status, second.status) == statuses[case], (first, second)
    said = {"dies": "process 1 has died", "fails": "has ended with status 1", "signal": BEFORE}
    assert said[case] in first.stderr
    assert "Traceback" not in first.stderr
    assert first.stderr.count("\n") <= 2
    if case == "fails":
        assert re.fullmatch("error: process 1 on .*: Unable to initialize backend 'none': .*\n", second.stderr)


@pytest.mark.slow
def test_wherever_in_a_round_a_process_dies_no_other_one_takes_its_devices_messages_for_others(tmp_path):
    """It would end with a stack trace at once, in one of four kills; rounds are short here, most of them exchanges."""
    one_step = [f"--config.{who}.{key}" for who in ("client", "server.training") for key in ("epochs=0", "steps=1")]
    for number in range(8):
        workdir = tmp_path / str(number)
        jobs = hosts.launched(2, "--config=digits:fl2", "--config.model.width=4", *one_step, *LONG, f"--workdir={workdir}")
        wait_for_rounds(workdir, 3, jobs)
        time.sleep(random.random())
        jobs[1].kill()
        time.sleep(3)
        status = jobs[0].poll()
        jobs[0].kill()
        (first, _) = hosts.ended(jobs)
        assert status is None, first.stderr


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"seeds": 3}, "seeds, vary: got 3 runs in 2 processes, accepted: one run"),
        ({"execution": {"data": "host"}}, "execution.data: got host in 2 processes, accepted: device"),
        ({"execution": {"strategy": "scan"}}, "execution.strategy: got scan in 2 processes, accepted: auto, sharded"),
        ({"execution": {"devices": 3}}, "execution.devices: got 3 in 2 processes, accepted: 0 or 4, all of them"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(monkeypatch, keys, line):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=line):
        layout.resolve(Settings.from_dict(keys), Requires(), num_runs=keys.get("seeds", 1))


def test_all_devices_share_the_clients_of_several_processes(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    found = layout.resolve(Settings.from_dict({"cohort_size": 3, "data": {"num_clients": 3}}), Requires())
    assert (found.strategy, found.devices, found.runs_at_once) == ("sharded", 4, 1)
    assert not found.execution(Settings()).auto_chunk


@pytest.mark.slow
@pytest.mark.parametrize(("process", "number"), [(0, signal.SIGTERM), (1, signal.SIGTERM), (1, signal.SIGKILL)])
def test_a_signal_before_the_rounds_ends_all_also_where_one_waits_for_another(tmp_path, config, monkeypatch, process, number):
    """The main thread waits in XLA, which does not let Python in; process 1 never comes.

    After a kill JAX raises an error of its own there or, now and then, a ValueError, which is none of the input's.
    """
    run_at_start(
        monkeypatch,
        tmp_path,
        "import sys, time\nif '--process_id=1' in sys.orig_argv:\n    from fedjax_ssl.experiment import build\n"
        "    build.build = lambda *args, **options: (print('waits', flush=True), time.sleep(600))\n"
        "else:\n    import jax\n    usual = jax.block_until_ready\n"
        "    def waits(x):\n        try:\n            return usual(x)\n"
        "        except jax.errors.JaxRuntimeError as error:\n            raise ValueError(f'UNKNOWN: {error}') from None\n"
        "    jax.block_until_ready = waits\n",
    )
    jobs = hosts.launched(2, config, f"--workdir={tmp_path / 'job'}", *LONG)
    assert "waits\n" in jobs[1].stdout  # after what Gloo says
    time.sleep(2)
    began = time.monotonic()
    jobs[process].send_signal(number)
    first, second = hosts.ended(jobs)
    assert time.monotonic() - began < (20 if number == signal.SIGTERM else 60)
    assert (first.status, second.status) == ((143, 143) if number == signal.SIGTERM else (1, -signal.SIGKILL)), (first, second)
    said = "has ended with status 143" if number == signal.SIGTERM else "has died, without a sign of life for 20 s"
    assert (BEFORE if process == 0 else said) in first.stderr
    assert (first.stderr.count("\n"), second.stderr) == (1, "")


IN_0, IN_2 = "in process 0 and", "in process 2"


@pytest.mark.parametrize(
    ("first", "other", "said"),
    [
        ({"a": 1}, {"a": 1}, ""),
        ({"a": 1, "b": 0, "c": 4}, {"a": 2, "b": 0, "c": 3}, f"a is 1 {IN_0} 2 {IN_2}, c is 4 {IN_0} 3 {IN_2}"),
        ({"a": 1}, {}, f"a is 1 {IN_0} None {IN_2}"),
        ({}, {"a": 1}, f"a is None {IN_0} 1 {IN_2}"),
    ],
)
def test_the_first_process_that_differs_is_named_with_all_that_does(first, other, said):
    assert package._differing([first, first, other]).rpartition("same in all: ")[2] == said


class Service:
    """JAX's client, with the signs of life that are left to come."""

    def __init__(self, *signs):
        self.signs, self.looks = list(signs), 0

    def key_value_dir_get(self, key):
        self.looks += 1
        if not self.signs:
            raise jax.errors.JaxRuntimeError("gone")
        return [(f"{key}{number}", sign) for number, sign in enumerate(self.signs.pop(0))]


def test_after_an_error_a_process_waits_until_all_others_have_given_a_sign_of_life(monkeypatch):
    """One that has died gives none, and is found and named meanwhile, whatever the error is."""
    monkeypatch.setattr(package._job(), "num_processes", 3)
    monkeypatch.setattr(package, "BEAT", 0.01)
    monkeypatch.setattr(package, "DEAD_AFTER", 0.3)
    for signs in ([("a1", "b1", "c1"), ("a2", "b1", "c1"), ("a2", "b2", "c1"), ("a2", "b2", "c2"), ("never", "read", "")],):
        service = Service(*signs)
        package._wait_for_signs(service)
        assert service.looks == 4
    for service in (Service(*[("a", "b", "c")] * 2, *[("a", "b2", "c")] * 1000), Service(("a", "b", "c"))):
        began = time.monotonic()
        package._wait_for_signs(service)
        assert time.monotonic() - began >= 0.3


def test_a_process_is_dead_once_its_sign_of_life_stays_the_same():
    seen, looks = {}, int(package.DEAD_AFTER / package.BEAT)
    for beat in range(2):
        signs = {"0": f"process 0 on x {beat}", "1": f"process 1 on y {beat}"}
        assert [package._dead(signs, seen) for _ in range(looks + 1)] == [""] * (looks + 1)
    signs["0"] = "process 0 on x 2"
    assert package._dead(signs, seen) == "process 1 on y"
