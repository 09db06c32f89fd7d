"""That commands ask for huge pages: once, where it gives some, and without ending what runs a command within itself."""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

from launch import command

ASKED = f"{command.HUGE_PAGES}=1"
gives_huge_pages = pytest.mark.skipif(not command.asking_gives_huge_pages(), reason="no huge pages for those who ask")


def begun(code: str, folder: pathlib.Path, *words: str, given: str = "") -> list[str]:
    """The lines that Python prints with these words, in a folder with the code as its `main.py`."""
    (folder / "main.py").write_text(textwrap.dedent(code))
    there = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"} | {"PYTHONPATH": os.getcwd()}
    there |= {"GLIBC_TUNABLES": given} if given else {}
    words = [sys.executable, *words]
    return subprocess.check_output(words, text=True, env=there, cwd=folder, stdin=subprocess.DEVNULL).splitlines()


@gives_huge_pages
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", ASKED),
        ("glibc.malloc.arena_max=2", f"glibc.malloc.arena_max=2:{ASKED}"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_a_command_begins_again_and_has_huge_pages_unless_told_otherwise(tmp_path, given, expected):
    code = r"""
        import os, re, sys
        print("begun", os.getpid(), flush=True)
        from launch import command
        command.ask_for_huge_pages()
        print(os.environ["GLIBC_TUNABLES"], sys.argv[1:], os.getpid(), sys.warnoptions, sys.flags.optimize)
        words = "a" * (1 << 28)
        print(re.search(r"AnonHugePages: *(\d+) kB", open("/proc/self/smaps_rollup").read())[1])
    """
    *lines, last, kilobytes = begun(code, tmp_path, "-W", "ignore", "-O", "-m", "main", "--a=b c", given=given)
    assert len(set(lines)) == 1  # the same process
    assert len(lines) == (1 if given == expected else 2)
    assert last == f"{expected} ['--a=b c'] {lines[0].split()[1]} ['ignore'] 1"
    assert (int(kilobytes) > (1 << 17)) == (ASKED in expected)  # of 256 MB


@gives_huge_pages
@pytest.mark.parametrize(
    ("words", "times"),
    [
        (["-m", "main"], 2),
        (["-m", "pdb", "-c", "continue", "-m", "main"], 1),
        (["main.py"], 1),
        (["runner.py", "-m", "main"], 1),
        (["-c", "import runpy; runpy.run_module('main', run_name='__main__', alter_sys=True)", "word"], 1),
        (["-c", "import main"], 1),
    ],
)
def test_a_process_that_runs_a_command_within_itself_goes_on(tmp_path, words, times):
    code = """
        import sys
        from launch import command
        print("begun", flush=True)
        command.ask_for_huge_pages()
        sys.exit(0)
    """
    runner = "import runpy, sys; sys.argv = sys.argv[2:]; runpy.run_module('main', run_name='__main__', alter_sys=True)"
    (tmp_path / "runner.py").write_text(runner)
    assert begun(code, tmp_path, *words).count("begun") == times


@gives_huge_pages
def test_a_command_begins_again_once_whatever_becomes_of_its_environment_and_goes_on_where_it_cannot(tmp_path):
    code = """
        import os, sys
        print("begun", flush=True)
        from launch import command
        os.environ.pop("GLIBC_TUNABLES", "")
        command.ask_for_huge_pages()
        sys.executable = "/nowhere"
        sys._xoptions.clear()
        command.ask_for_huge_pages()
        print("done")
    """
    assert begun(code, tmp_path, "-m", "main") == ["begun", "begun", "done"]


@pytest.mark.parametrize(
    ("policy", "libc"),
    [
        ("[always] madvise never", "glibc 2.36"), ("always madvise [never]", "glibc 2.36"), (None, "glibc 2.36"),
        ("always [madvise] never", "glibc 2.34"), ("always [madvise] never", "musl 1.2"), ("always [madvise] never", None),
    ],
)  # fmt: skip
def test_huge_pages_are_not_asked_for_where_that_gives_none(tmp_path, monkeypatch, policy, libc):
    there = tmp_path / "enabled"
    monkeypatch.setattr(command, "PAGES_POLICY", there)
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.35")
    there.write_text("always [madvise] never")
    assert command.asking_gives_huge_pages()
    monkeypatch.setattr(os, "confstr", lambda name: libc)
    there.write_text(policy) if policy else there.unlink()
    assert not command.asking_gives_huge_pages()


@gives_huge_pages
def test_a_run_asks_for_huge_pages(tmp_path):
    code = "import os; raise ValueError(os.environ['GLIBC_TUNABLES'])"
    (tmp_path / "config.py").write_text(code)
    there = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
    words = [sys.executable, "-m", "launch.run", f"--config={tmp_path / 'config.py'}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=there)
    assert done.stderr == f"error: --config: {ASKED}\n"
