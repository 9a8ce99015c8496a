"""`deltawire keygen` makes keys, and other commands sign or check signatures."""

from __future__ import annotations

import re
import stat
from pathlib import Path

from chain_commands import load_checkpoint, state
from test_cli import assert_same, fail, run, succeed


def test_readers_accept_only_versions_that_a_trusted_key_signed(checkpoints: list[Path], tmp_path: Path) -> None:
    keys = [succeed("keygen", tmp_path / name)["public"] for name in ("ours", "theirs")]
    assert stat.S_IMODE((tmp_path / "ours").stat().st_mode) == 0o600
    chain = tmp_path / "chain"
    succeed("publish", checkpoints[0], chain, "--sign", tmp_path / "ours")
    succeed("pull", chain, tmp_path / "trusted", "--trust", keys[1], "--trust", keys[0])
    assert_same(load_checkpoint(tmp_path / "trusted"), state(0))
    fail("pull", chain, tmp_path / "untrusted", "--trust", keys[1], kind="SignatureInvalid")
    fail("follow", chain, tmp_path / "mirror", "--once", "--trust", keys[1], kind="SignatureInvalid")
    assert succeed("show", chain)["signature"] == {"is": "valid", "key": keys[0]}
    assert succeed("verify", chain, "--trust", keys[0])["ok"]
    assert run("verify", chain, "--trust", keys[1]).returncode == 3
    assert not (tmp_path / "untrusted").exists()
    moved = chain.rename(tmp_path / "elsewhere")
    assert "--run" in fail("pull", moved, tmp_path / "moved", "--trust", keys[0], kind="WrongRun")
    succeed("pull", moved, tmp_path / "moved", "--trust", keys[0], "--run", chain.name)
    succeed("gc", moved, "--trust", keys[0], "--run", chain.name)
    succeed("verify", moved)
    assert "--run" in fail("verify", moved, "--trust", keys[0], kind="WrongRun")
    assert "of its own" not in fail("verify", moved, "--run", "other", kind="RunMismatch")  # that hint is for publishers


def test_publishers_go_on_only_with_a_chain_that_is_signed_as_they_sign(checkpoints: list[Path], tmp_path: Path) -> None:
    old, new = (succeed("keygen", tmp_path / name)["public"] for name in ("old", "new"))
    chain = tmp_path / "chain"
    succeed("publish", checkpoints[0], chain, "--sign", tmp_path / "old")
    for options in ([], ["--sign", tmp_path / "new"]):
        refused = fail("publish", checkpoints[1], chain, *options, kind="SignatureInvalid")
        assert "`--sign KEYFILE`" in refused
        assert "Trust the key that the publisher signs with" not in refused  # that hint is for readers
    not_a_key = checkpoints[0] / "config.json"
    for command in (["publish", checkpoints[1], chain, "--sign", not_a_key], ["keygen", "--public", not_a_key]):
        done = run(*command)
        assert done.returncode == 2
        assert "is not a deltawire signing key" in " ".join(done.stderr.replace("│", " ").split())
    assert "it is not a safetensors file" in fail("publish", not_a_key, chain, kind="CheckpointError")
    assert run("publish", checkpoints[1], chain, "--trust", old).returncode == 2
    succeed("publish", checkpoints[1], chain, "--sign", tmp_path / "new", "--trust", old)
    assert succeed("verify", chain, "--trust", old, "--trust", new)["notes"] == []
    succeed("publish", checkpoints[0], tmp_path / "unsigned")
    fail("pull", tmp_path / "unsigned", tmp_path / "pulled", "--trust", old, kind="SignatureInvalid")


def test_a_key_is_never_overwritten_nor_used_if_others_can_read_it(checkpoints: list[Path], tmp_path: Path) -> None:
    done = run("keygen", tmp_path / "key")
    assert re.search(r"public key +[0-9a-f]{64}\n", done.stdout)
    assert re.search(r"secret key +in the file", done.stdout)
    assert re.search(r"keep secret +this file, not the public key", done.stdout)
    content = (tmp_path / "key").read_bytes()
    assert "exists already" in fail("keygen", tmp_path / "key", kind="FileExistsError")
    assert (tmp_path / "key").read_bytes() == content
    (tmp_path / "key").chmod(0o644)
    done = run("publish", checkpoints[0], tmp_path / "chain", "--sign", tmp_path / "key")
    assert done.returncode == 2
    assert "chmod 600" in done.stderr
    assert not (tmp_path / "chain").exists()
