"""`tests/install_packages.py` gives uv the settings of pip."""

from __future__ import annotations

from install_packages import uv_environment

LISTED = """:env:.find-links='/wheels'
:env:.disable-pip-version-check='1'
global.cert='/certificates'
global.extra-index-url='https://one/simple\\nhttps://two/simple'
global.find-links='/other /wheels'
install.index-url='https://zero/simple'
"""


def test_uv_gets_the_indexes_folders_and_certificates_of_pip() -> None:
    assert uv_environment(LISTED, {"HOME": "/home"}) == {
        "HOME": "/home",
        "SSL_CERT_FILE": "/certificates",
        "UV_DEFAULT_INDEX": "https://zero/simple",
        "UV_EXTRA_INDEX_URL": "https://one/simple https://two/simple",
        "UV_FIND_LINKS": "/wheels",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }


def test_variables_that_are_set_for_uv_are_kept() -> None:
    assert uv_environment(LISTED, {"UV_FIND_LINKS": "/mine", "UV_INDEX_STRATEGY": "first-index"})["UV_FIND_LINKS"] == "/mine"
    assert uv_environment("", {"UV_INDEX_STRATEGY": "first-index"}) == {"UV_INDEX_STRATEGY": "first-index"}
