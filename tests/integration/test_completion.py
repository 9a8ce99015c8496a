"""Shells complete commands, options and choices with the scripts that `deltawire --show-completion` prints.

Bash is real. The questions of zsh and fish are asked as their scripts do, and in the real shells where they are installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from forked_cli import run_forked
from test_cli import environment

BASH = shutil.which("bash") or pytest.skip("bash is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Return an environment in which `deltawire` is a command, with an empty home directory."""
    folder = tmp_path_factory.mktemp("shell")
    program = folder / "deltawire"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m deltawire "$@"\n')
    program.chmod(0o755)
    usual = environment()
    return usual | {"PATH": f"{folder}:{usual['PATH']}", "HOME": str(folder)}


def output(command: list[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr == ""
    return done.stdout


def script_for(name: str, shell: Mapping[str, str]) -> str:
    """Return the script for a shell that need not be installed."""
    return run_forked(["--show-completion", name], shell | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}).stdout


def completed_by_bash(words: str, shell: Mapping[str, str], script: str) -> set[str]:
    """Complete the last of these words as bash does when Tab is pressed."""
    code = f'{script}\nCOMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _deltawire_completion deltawire; printf "%s\\n" '
    return set(output([BASH, "--norc", "-c", code + '"${COMPREPLY[@]}"'], shell).split())


def test_bash_completes_commands_options_and_choices(shell: Mapping[str, str]) -> None:
    script = output([BASH, "--norc", "-c", "deltawire --show-completion; exit"], shell)  # the shell is recognised
    assert script == script_for("bash", shell)
    assert completed_by_bash("deltawire pu", shell, script) == {"publish", "pull"}
    assert {"--step", "--sign", "--skip"} & completed_by_bash("deltawire publish --s", shell, script) == {"--step", "--sign"}
    assert completed_by_bash("deltawire sidecar --pause ''", shell, script) == {"keep", "wait", "abort"}
    assert completed_by_bash("deltawire publish check", shell, script) == set()  # then bash completes names of files


def test_installed_completion_is_there_in_the_next_shell(shell: Mapping[str, str]) -> None:
    assert "bash completion installed" in output([BASH, "--norc", "-c", "deltawire --install-completion; exit"], shell)
    code = "source ~/.bashrc; complete -p deltawire"
    assert output([BASH, "--norc", "-c", code], shell) == "complete -o default -F _deltawire_completion deltawire\n"


@pytest.mark.parametrize("name", ["zsh", "fish"])
def test_zsh_and_fish_get_commands_and_options(shell: Mapping[str, str], name: str) -> None:
    script = script_for(name, shell)
    assert f"_DELTAWIRE_COMPLETE=complete_{name}" in script
    asked = {"_DELTAWIRE_COMPLETE": f"complete_{name}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    for typed, expected in (("deltawire pu", {"publish", "pull"}), ("deltawire publish --res", {"--resume-from"})):
        told = run_forked([], shell | asked | {"_TYPER_COMPLETE_ARGS": typed}).stdout
        found = re.findall(r'"([^"]+)":"' if name == "zsh" else r"(?m)^([^\t]+)\t", told)
        assert set(found) == expected


@pytest.mark.parametrize("name", ["zsh", "fish"])
def test_the_real_shells_accept_their_scripts(shell: Mapping[str, str], tmp_path: Path, name: str) -> None:
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed")
    file = tmp_path / "script"
    file.write_text(script_for(name, shell))
    assert output([program, "-n", str(file)], shell) == ""
    if name == "fish":
        found = output([program, "--no-config", "-c", f'source {file}; complete -C "deltawire pu"'], shell)
        assert [line.split("\t")[0] for line in found.splitlines()] == ["publish", "pull"]
