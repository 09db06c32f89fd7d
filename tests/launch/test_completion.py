"""Shell completion, by the shells themselves: by Bash and, where they are installed, by zsh and fish."""

import os
import pty
import shutil
import subprocess
import time

import pytest

from fedjax_ssl.methods import METHODS
from launch import completion, config_file
from tests.commands import ROOT

DRIVER = """
source {file}
COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
while IFS= read -r COMP_LINE; do
  COMP_POINT=${{#COMP_LINE}}
  _fedjax_ssl
  printf '%s,' "${{COMPREPLY[@]}}"
  echo
done
"""
LINES = {
    "fedjax-ssl pre": ["preview", "prepare"],
    "fedjax-ssl run --w": ["--workdir="],
    "fedjax-ssl run --config=dig": ["digits:"],  # Bash takes `--config=` to be a word of its own
    "fedjax-ssl run --config=digits:fedsiam_": ["fedsiam_d", "fedsiam_mt", "fedsiam_pi"],
    "fedjax-ssl run --config=digits:fl2 --config.client.opt": ["--config.client.optimizer."],
    "fedjax-ssl run --config=digits:fl2 --config.rou": ["--config.rounds="],
    "fedjax-ssl run --config.method.mix": ["--config.method.mix=", "--config.method.mixup_alpha="],
    "fedjax-ssl run --config=digits:fl2 --config.execution.strategy=s": ["scan", "sharded"],
    "fedjax-ssl preview --config=digits:fl2 --config.data.partition=nat": ["natural"],
    "fedjax-ssl prepare svh": ["svhn_cropped", "svhn_cropped/extra"],
    "fedjax-ssl sweep fl2_abl": ["fl2_ablation"],
    "fedjax-ssl sweep --config.ro": ["--config.rounds="],
    "fedjax-ssl evaluate --config": ["--config="],
    "fedjax-ssl explain net": ["networks"],
    "fedjax-ssl report runs/": [""],  # Bash then completes files
    "fedjax-ssl report --targ": ["--target="],
    "fedjax-ssl completion z": ["zsh"],
    "python -m launch.ev": ["launch.evaluate"],
    "JAX_PLATFORMS=cpu python -m launch.run --dr": ["--dry_run"],
    "python script.py --w": [""],
}  # fmt: skip


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """Each shell's script as a file."""
    folder = tmp_path_factory.mktemp("completion")
    words = completion.words()
    for shell, text in completion.SHELLS.items():
        (folder / shell).write_text(text.format(words=words, programs="fedjax-ssl python python3"))
    return folder


def test_bash_completes_commands_arguments_configs_and_keys(scripts):
    lines = "\n".join(LINES) + "\n"
    environment = {**os.environ, "PATH": "/usr/bin:/bin"}  # without the Python of the tests: none is needed
    words = ["bash", "--norc", "-c", DRIVER.format(file=scripts / "bash")]
    done = subprocess.run(words, input=lines, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    found = [line.removesuffix(",").split(",") for line in done.stdout.splitlines()]
    assert dict(zip(LINES, found, strict=True)) == LINES


def test_all_keys_of_a_config_are_found_group_by_group(scripts):
    words = completion.words()

    def offered(text):
        line = f"fedjax-ssl run --config=digits:fl2 {text}"
        return subprocess.run(["sh", "-fc", words, "_", line], capture_output=True, text=True, check=True).stdout.split()

    def below(prefix):
        for word in offered(prefix):
            yield from below(word) if word.endswith(".") else [word.removeprefix("--config.").removesuffix("=")]

    found = list(below("--config."))
    assert len(found) == len(set(found))
    for method in METHODS:
        known = set(config_file.keys(config_file.read(f"digits:{method}").tree))
        assert {key for key in known if not any(other.startswith(f"{key}.") for other in known)} <= set(found)


WANTED = "got run --config=digits:semifl --config.rounds=3"


def typed(words, start):
    """What a shell on a terminal shows once it is ready, and a command line with two tabs is typed."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "HOME": "/nowhere"}
    process = subprocess.Popen(
        words, stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, env=environment, start_new_session=True
    )
    os.close(slave)
    os.set_blocking(master, False)
    shown, deadline = "", time.monotonic() + 60

    def show(text):
        nonlocal shown
        while text not in shown and time.monotonic() < deadline:
            try:
                shown += os.read(master, 4096).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.01)

    try:
        os.write(master, f'{start}; fedjax-ssl() {{ echo "got $*"; }}; PS1="rea""dy> "\n'.encode())
        show("ready> ")
        os.write(master, b"fedjax-ssl run --config=digits:semi\t--config.rou\t3\n")
        show(WANTED)
        return shown
    finally:
        process.kill()
        process.wait()
        os.close(master)


@pytest.mark.parametrize(
    ("shell", "arguments", "start"), [("bash", "--norc", ""), ("zsh", "-f", "autoload -U compinit; compinit -D; ")]
)
def test_a_shell_on_a_terminal_fills_in_a_config_and_a_key(scripts, shell, arguments, start):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    assert WANTED in typed([shell, arguments, "-i"], f"{start}source {scripts}/{shell}")


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
def test_fish_completes_a_config_and_a_key(scripts):
    asked = "; ".join(f"complete -C 'fedjax-ssl run --config{words}'" for words in ("=digits:semi", ".rou"))
    words = ["fish", "--no-config", "-c", f"source {scripts}/fish; {asked}"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["--config=digits:semifl", "--config.rounds="]
