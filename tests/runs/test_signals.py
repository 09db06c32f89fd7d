"""Signals while XLA computes: the first Ctrl-C is answered at once, a second ends at once; a terminal that is closed."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from fedjax_ssl.runs.signals import BEFORE, ENDED, SIGNALS, STOPPING, Stop
from launch import STOPPED
from tests.commands import CONFIG, ROOT, content, launch_process, rows, run_at_start, succeeded

pytestmark = [pytest.mark.reliability, pytest.mark.usefixtures("own_methods", "usual_signals")]

STALLS = CONFIG.replace(
    "average.register()",
    """average.register()
    from fedjax_ssl.methods import METHODS

    def stalling(**given):
        \"\"\"`average`, whose third round takes minutes.\"\"\"
        method = average.average(**given)

        def begin(times):
            if times >= 2:
                print("begun", flush=True)
            return numpy.int32(2**31 - 1 if times >= 2 else 0)

        def client_update(shared, per_client, times, client_data, key):
            count = jax.experimental.io_callback(begin, jax.ShapeDtypeStruct((), "int32"), times)
            zero = jax.lax.fori_loop(0, count, lambda i, x: x * 0.5, 0.0)
            return method.client_update({"params": shared["params"] + zero}, per_client, times, client_data, key)

        return method._replace(client_update=client_update)

    stalling.__signature__ = inspect.signature(average.average)
    METHODS["average"] = stalling""",
).replace('"cohort_size": 3, "eval_every": 2,\n        "checkpoint_every": 2', '"cohort_size": 6, "checkpoint_every": 1')
STALLS = f"import inspect\nimport jax.experimental\nimport numpy\n{STALLS}"


def wait_for(condition, process):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.mark.ci
def test_ctrl_c_in_a_long_round_is_answered_at_once_and_a_second_one_ends_at_once(tmp_path):
    (tmp_path / "stalls.py").write_text(STALLS)
    arguments = [f"--config={tmp_path / 'stalls.py'}", f"--workdir={tmp_path / 'run'}"]
    process = launch_process(*arguments)
    assert process.stdout.readline() == "begun\n"  # the third round
    wait_for((tmp_path / "run" / "checkpoints" / "2").is_dir, process)
    process.send_signal(signal.SIGINT)
    while (line := process.stderr.readline()) != f"{STOPPING}\n":
        assert line, process.communicate()
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip() == ENDED
    assert [row["round"] for row in rows(tmp_path / "run")] == [1, 2]
    assert "going on after round 2" in succeeded(*arguments, "--stop_after=2").stderr


@pytest.mark.parametrize("is_read", [True, False])
def test_ctrl_c_before_anything_is_read_ends_a_command_with_one_line(tmp_path, monkeypatch, is_read):
    """Also where Ctrl-C has ended what reads the output, as in `2>&1 | tee log`, and some of it is not written yet."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    config = "import os, sys, time\nsys.__stdout__.write('more\\n')\nos.write(1, b'begun\\n')\ntime.sleep(60)\n"
    (tmp_path / "slow.py").write_text(config)
    process = launch_process(f"--config={tmp_path / 'slow.py'}")
    assert process.stdout.readline() == "begun\n"
    if not is_read:
        process.stdout.close()
        process.stderr.close()
        process.stdout = process.stderr = None
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=50) == (("more\n", f"{STOPPED}\n") if is_read else (None, None))
    assert process.returncode == 130


INSTALLED = "import sys; from fedjax_ssl.launch.main import main; sys.argv = ['fedjax-ssl', 'sweep', '--help']; main()"


READS = """
import os, time
from fedjax_ssl.experiment import plan

def load_dataset(settings, **options):
    os.write(1, b"begun\\n")
    time.sleep(600)

plan.load_dataset = load_dataset
"""
HOLDS = """
import sys, time

class Holds:
    def find_spec(self, name, *_):
        if name == "jaxlib":
            print("begun", flush=True)
            time.sleep(600)

sys.meta_path.insert(0, Holds())
"""


@pytest.mark.parametrize("words", [["-m", "launch.sweep", "--help"], ["-c", INSTALLED]], ids=["module", "program"])
def test_ctrl_c_while_the_package_is_imported_ends_a_command_with_one_line(tmp_path, monkeypatch, words):
    run_at_start(monkeypatch, tmp_path, HOLDS)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, **pipes)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", f"{STOPPED}\n")
    assert process.returncode == 130


def test_signals_are_stored_and_the_handlers_before_come_back(monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda file: False)  # else SIGHUP takes the tests' own terminal to be gone
    before = [signal.getsignal(number) for number in SIGNALS]
    for number in SIGNALS:
        with Stop.on_signals() as stop:
            stop.begin()
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == number
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` has it
    try:
        with Stop.on_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.signal is None
    finally:
        signal.signal(signal.SIGHUP, before[-1])
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_second_signal_before_rounds_begin_does_not_disturb_how_the_first_one_ends_the_run(monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda file: False)
    ended = []

    def runs():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            ended.append(True)

    with Stop.on_signals(), pytest.raises(KeyboardInterrupt):
        runs()
    assert ended


@pytest.mark.parametrize(
    "number", [pytest.param(one, marks=pytest.mark.ci if one == signal.SIGTERM else pytest.mark.slow) for one in SIGNALS]
)
def test_the_first_signal_ends_a_run_whose_data_are_still_read(tmp_path, config, number):
    reads = tmp_path / "reads.py"
    reads.write_text(f"{CONFIG}\n{READS}")
    process = launch_process(f"--config={reads}", f"--workdir={tmp_path / 'run'}")
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    assert process.communicate(timeout=60) == ("", f"{BEFORE}\n")
    assert process.returncode == 128 + number
    assert not content(tmp_path / "run")
    succeeded(config, f"--workdir={tmp_path / 'run'}", "--stop_after=1")


SAVES = ("--config.rounds=100000", "--config.checkpoint_every=100000")


def has_begun(workdir):
    log = workdir / "metrics.jsonl"
    return log.exists() and log.read_text().count("\n") >= 3


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_a_checkpoint_and_the_run_goes_on_from_it(tmp_path, config, number):
    workdir = tmp_path / "run"
    process = launch_process(config, f"--workdir={workdir}", *SAVES)
    wait_for(lambda: has_begun(workdir), process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert "Traceback" not in errors
    finished = len(rows(workdir))
    assert (workdir / "checkpoints" / str(finished)).is_dir()
    succeeded(config, f"--workdir={workdir}", *SAVES, f"--stop_after={finished + 2}")
    assert [row["round"] for row in rows(workdir)] == list(range(1, finished + 3))


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_saves_a_checkpoint(tmp_path, config):
    workdir = tmp_path / "run"
    master, slave = pty.openpty()
    of_terminal = f'exec "$@" <>{os.ttyname(slave)} >&0 2>&1'  # the first that a session opens is its own
    words = ["sh", "-c", of_terminal, "_", sys.executable, "-m", "launch.run", config, f"--workdir={workdir}", *SAVES]
    process = subprocess.Popen(words, cwd=ROOT, start_new_session=True)
    os.set_blocking(master, False)

    def read_until_it_has_begun():
        with contextlib.suppress(BlockingIOError):
            os.read(master, 1 << 16)  # as a terminal does
        return has_begun(workdir)

    wait_for(read_until_it_has_begun, process)
    os.close(slave)
    os.close(master)
    assert process.wait(timeout=60) == 129
    assert (workdir / "checkpoints" / str(len(rows(workdir)))).is_dir()
