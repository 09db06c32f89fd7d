"""Shell completion, by the shells themselves: by Bash and, where they are installed, by zsh and fish."""

import os
import pty
import re
import shlex
import shutil
import subprocess
import time

import pytest

from fedjax_ssl.methods import METHODS
from launch import completion, config_file
from tests.commands import ROOT, succeeded

LINES = {
    "fedjax-ssl pre": ["preview", "prepare"],
    "fedjax-ssl run --w": ["--workdir"],
    "fedjax-ssl run --config=digits:fedsiam_": ["digits:fedsiam_d", "digits:fedsiam_mt", "digits:fedsiam_pi"],
    "fedjax-ssl run --config digits:semi": ["digits:semifl"],
    "fedjax-ssl run --config=digits:fl2 --config.rou": ["--config.rounds"],
    "fedjax-ssl run --config=digits:fl2 --config.rounds 3 --config.method.mix": [
        "--config.method.mix", "--config.method.mixup_alpha",
    ],
    "fedjax-ssl run --config=digits:fl2 --config.execution.strategy=s": ["scan", "sharded"],
    "fedjax-ssl preview --config=digits:fl2 --config.data.partition nat": ["natural"],
    "fedjax-ssl prepare svh": ["svhn_cropped", "svhn_cropped/extra"],
    "fedjax-ssl sweep fl2_abl": ["fl2_ablation"],
    "fedjax-ssl sweep --config.ro": ["--config.rounds"],
    "fedjax-ssl explain net": ["networks"],
    "fedjax-ssl report LICEN": ["LICENSE"],
    "fedjax-ssl report --targ": ["--target"],
    "fedjax-ssl completion z": ["zsh"],
}  # fmt: skip


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """A folder with each shell's script."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in completion.SHELLS:
        (folder / shell).write_text(succeeded(shell, program=completion).stdout)
    (folder / "zfunc").mkdir()
    shutil.copy(folder / "zsh", folder / "zfunc" / "_fedjax-ssl")
    return folder


def offered(scripts, line):
    """What Bash offers for a command line, of which `=` is a word of its own, as Bash takes it."""
    words = shlex.join(re.findall(r"=|[^\s=]+", line))
    asked = f"source {scripts}/bash; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _shtab_fedjax_ssl"
    program = ["bash", "--norc", "-c", f"compopt() {{ :; }}; {asked}; printf '%s\n' \"${{COMPREPLY[@]}}\""]
    environment = {**os.environ, "PATH": "/usr/bin:/bin"}  # without the Python of the tests: none is needed
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("line", LINES)
def test_bash_completes_commands_arguments_configs_keys_and_files(scripts, line):
    assert offered(scripts, line) == LINES[line]


def test_all_keys_of_a_config_are_offered(scripts):
    found = [word.removeprefix("--config.") for word in offered(scripts, "fedjax-ssl run --config=digits:fl2 --config.")]
    assert len(found) == len(set(found))
    for method in METHODS:
        known = set(config_file.keys(config_file.read(f"digits:{method}").tree))
        assert {key for key in known if not any(other.startswith(f"{key}.") for other in known)} <= set(found)


WANTED = {"bash": "got run --config=digits:semifl --config.rounds 3", "zsh": "got run --config=digits:semifl --config.rounds=3"}


def typed(words, start, wanted):
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
        show(wanted)
        return shown
    finally:
        process.kill()
        process.wait()
        os.close(master)


@pytest.mark.parametrize(
    ("shell", "arguments", "start"),
    [
        ("bash", "--norc", "source {scripts}/bash"),
        (
            "zsh",
            "-f",
            "fpath=({scripts}/zfunc $fpath); autoload -U compinit; compinit -D",
        ),
    ],
)
def test_a_shell_on_a_terminal_fills_in_a_config_and_a_key(scripts, shell, arguments, start):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    assert WANTED[shell] in typed([shell, arguments, "-i"], start.format(scripts=scripts), WANTED[shell])


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
def test_fish_completes_a_config_and_a_key(scripts):
    asked = "; ".join(f"complete -C 'fedjax-ssl run --config{words}'" for words in ("=digits:semi", ".rou"))
    words = ["fish", "--no-config", "-c", f"source {scripts}/fish; {asked}"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["--config=digits:semifl", "--config.rounds"]
