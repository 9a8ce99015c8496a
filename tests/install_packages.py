"""Install packages into this interpreter's environment by uv, which takes a quarter of the processor time that pip takes.

    python tests/install_packages.py PACKAGE …
    python tests/install_packages.py --requirements pyproject.toml --extra test

uv gets pip's settings, because it does not read them itself: indexes, folders of wheels, certificates. If uv cannot be had or fails, pip
installs the packages, and its messages are the ones that are shown. Only one process installs at a time.
"""

from __future__ import annotations

import ast
import fcntl
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

SETTINGS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
}
"""Settings of pip, and the variables that set the same for uv."""
SECTIONS = ("global", "install", ":env:")
"""Sections of pip's configuration. A later one replaces the settings of an earlier one."""


def uv_environment(listed: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables for uv, from the output of `pip config list`. Variables that are already set are kept."""
    found: dict[tuple[int, str], str] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, setting = name.partition(".")
        if section in SECTIONS and setting in SETTINGS and value:
            separator = "," if setting == "find-links" else " "
            found[SECTIONS.index(section), setting] = separator.join(str(ast.literal_eval(value)).split())
    variables = {SETTINGS[setting]: value for (_, setting), value in sorted(found.items())}
    # As pip does, take the best version that any index has.
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **variables, **environment}


def main(arguments: list[str]) -> int:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    uv = [sys.executable, "-m", "uv"]
    if subprocess.run([*uv, "--version"], capture_output=True, check=False).returncode != 0:
        subprocess.run([*pip, "install", "-q", "--no-compile", "uv"], stderr=subprocess.DEVNULL, check=False)
    listed = subprocess.run([*pip, "config", "list"], stdout=subprocess.PIPE, text=True, check=False).stdout
    command = [*uv, "pip", "install", "-q", "--python", sys.executable, *arguments]
    if subprocess.run(command, env=uv_environment(listed, os.environ), stderr=subprocess.DEVNULL, check=False).returncode == 0:
        return 0
    print("uv cannot install these packages, so pip does it.", file=sys.stderr)
    return subprocess.run([*pip, "install", "-q", "--no-compile", *_for_pip(arguments)], check=False).returncode


def _for_pip(arguments: list[str]) -> list[str]:
    """Return the same request for pip, which installs extras only together with the package of the current folder."""
    if arguments[:1] != ["--requirements"]:
        return arguments
    return [f".[{','.join(name for name in arguments[2:] if name != '--extra')}]"]


if __name__ == "__main__":
    with Path(sys.prefix, ".installing").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sys.exit(main(sys.argv[1:]))
