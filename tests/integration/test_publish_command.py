"""`deltawire publish`, run as processes with a directory as the store."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from chain_commands import data_of, flip_a_bit, load_checkpoint, state
from safetensors.numpy import save_file
from test_cli import FIRST, assert_same, fail, load, model, run, succeed, updated

from deltawire.errors import LimitExceeded
from deltawire.format.records.record_parts import Limits
from deltawire.publish import Publisher
from deltawire.publish.writer_options import WriterOptions
from deltawire.quantise.quantise import quantise_state


def test_the_first_version_is_a_checkpoint_and_the_next_a_small_delta(checkpoints: list[Path], tmp_path: Path) -> None:
    first = succeed("publish", checkpoints[0], tmp_path / "chain", "--step", 7, "--run", "toy", "--meta", "lr=1e-6", "--meta", "note=a=b")
    second = succeed("publish", checkpoints[1], tmp_path / "chain", "--run", "toy")
    assert (first["version"], first["seq"], first["kind"], first["step"]) == (1, 1, "anchor", 7)
    assert first["meta"] == {"lr": "1e-6", "note": "a=b"}
    assert first["left_out"] == ["optimizer.pt"]
    assert (second["version"], second["seq"], second["kind"], second["step"]) == (2, 3, "delta", None)
    assert second["bytes"] * 10 < second["weight_bytes"] == sum(array.nbytes for array in model().values())
    assert second["elements"] == sum(array.size for array in model().values())
    assert second["density"] == second["changed"] / second["elements"] > 0


def test_publishing_the_same_again_is_next_to_nothing(chain: Path, checkpoints: list[Path]) -> None:
    again = succeed("publish", checkpoints[-1], chain)
    assert (again["kind"], again["changed"]) == ("delta", 0)
    assert again["bytes"] < 1000
    done = run("publish", checkpoints[-1], chain)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "0 of " in done.stdout


def test_a_single_file_can_be_published(checkpoints: list[Path], tmp_path: Path) -> None:
    published = succeed("publish", checkpoints[0] / FIRST, tmp_path / "chain")
    assert published["left_out"] == []
    succeed("pull", tmp_path / "chain", tmp_path / "out")
    assert_same(load_checkpoint(tmp_path / "out"), load(checkpoints[0] / FIRST))


def test_changed_attachments_go_with_a_delta_and_full_forces_a_checkpoint(chain: Path, checkpoints: list[Path], tmp_path: Path) -> None:
    changed = shutil.copytree(checkpoints[-1], tmp_path / "changed")
    (changed / "tokenizer.json").unlink()
    (changed / "chat_template.jinja").write_text("{{ messages }}")
    names = ["chat_template.jinja", "-tokenizer.json"]
    done = succeed("publish", changed, chain)
    assert (done["kind"], done["changed"], done["files_changed"]) == ("delta", 0, names)
    assert [version["files_changed"] for version in succeed("log", chain)["versions"]] == [names, [], [], []]
    assert "changed files: chat_template.jinja" in " ".join(run("log", chain).stdout.split())
    (changed / "chat_template.jinja").write_text("{{ messages[0] }}")
    for options in (["--dry-run"], []):
        told = run("publish", changed, chain, *options).stdout
        assert re.search("changed files +chat_template.jinja\n", told)
        assert re.search("size +files only, no weights changed\n", told)
    succeed("pull", chain, tmp_path / "out")
    others = {path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".safetensors"}
    assert others == {"model.safetensors.index.json", "config.json", "chat_template.jinja"}
    for path in chain.rglob("data/*/*/*.safetensors"):
        path.unlink()
    assert succeed("publish", checkpoints[-1], chain, "--full")["kind"] == "anchor"
    succeed("pull", chain, tmp_path / "again")
    assert_same(load_checkpoint(tmp_path / "again"), state(2))
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (checkpoints[-1] / "tokenizer.json").read_bytes()


def test_resuming_from_an_older_version_abandons_the_newer(chain: Path, checkpoints: list[Path]) -> None:
    published = succeed("publish", checkpoints[2], chain, "--resume-from", 2)
    assert published["kind"] == "delta"
    commits = {commit["seq"]: commit for commit in succeed("log", chain, "--commits")["commits"]}
    assert [commits[seq]["kind"] for seq in (6, 7, 8)] == ["fence", "rewind", "delta"]
    assert commits[7]["base"] == 3
    assert [seq for seq, commit in commits.items() if commit["abandoned"]] == [5]
    text = run("log", chain).stdout
    assert "back to version 2" in text
    assert re.search(r"^· +3 .*abandoned$", text, re.M)
    assert "no version 99" in fail("publish", checkpoints[2], chain, "--resume-from", 99, kind="VersionUnknown")


def test_weights_that_are_not_finite_are_refused_before_the_run_is_taken_over(chain: Path, tmp_path: Path) -> None:
    bad = {"fine": np.ones(9, np.float32), "w": np.array([1, np.nan, np.inf], np.float32)}
    save_file(bad, tmp_path / "bad.safetensors")
    before = sorted(path.name for path in (chain / "commit").iterdir())
    assert "2 weights are NaN or infinite, in 'w' (2)" in fail("publish", tmp_path / "bad.safetensors", chain, kind="NonFiniteWeights")
    assert sorted(path.name for path in (chain / "commit").iterdir()) == before
    done = succeed("publish", tmp_path / "bad.safetensors", chain, "--allow-nonfinite")
    other_tensors, float32, nonfinite = done["warnings"]
    assert "other tensors than the version before" in other_tensors
    assert "float32" in float32
    assert "NaN" in nonfinite


def test_a_checkpoint_above_the_limits_of_the_run_is_refused_before_the_run_is_taken_over(tmp_path: Path) -> None:
    small = {"w": np.zeros(99, np.float16)}
    limits = Limits(state_bytes=1000, tensors=1, file_bytes=1000)
    with Publisher(tmp_path / "chain", attachments={}, options=WriterOptions(limits=limits)) as trainer:
        trainer.publish(small)
        save_file({"w": np.zeros(501, np.float16)}, tmp_path / "large.safetensors")
        assert "1,002 bytes of weights; this run allows 1,000" in fail(
            "publish", tmp_path / "large.safetensors", tmp_path / "chain", kind="LimitExceeded"
        )
        with pytest.raises(LimitExceeded, match=r"attachment 'vocab.txt' has 1,001 bytes"):
            Publisher(tmp_path / "chain", attachments={"vocab.txt": bytes(1001)})
        assert trainer.publish(small)


def test_a_publication_that_must_fail_does_not_fence_off_the_trainer(checkpoints: list[Path], tmp_path: Path) -> None:
    chain, weights = tmp_path / "chain", state(0)
    with Publisher(chain, attachments={}) as trainer:
        trainer.publish(weights)
        flip_a_bit(data_of(chain, 1)[0])
        before = sorted(chain.rglob("*"))
        fail("publish", checkpoints[1], chain, kind="DataDamaged")
        assert sorted(chain.rglob("*")) == before  # no epoch is claimed, and there is no fence
        assert trainer.publish(updated(weights)).seq == 2


def test_publishing_needs_the_right_run_and_a_checkpoint(chain: Path, checkpoints: list[Path], tmp_path: Path) -> None:
    before = succeed("log", chain)["head"]
    assert "'chain', not 'other'" in fail("publish", checkpoints[0], chain, "--run", "other", kind="RunMismatch")
    fail("publish", tmp_path / "nowhere", chain, kind="FileNotFoundError")
    fail("publish", tmp_path, chain, kind="CheckpointError")
    assert succeed("log", chain)["head"] == before  # no publisher was fenced


def test_a_quantised_chain_is_continued_only_if_the_command_says_how(tmp_path: Path) -> None:
    save_file({"a.q_proj.weight": np.ones((40, 64), np.float32)}, tmp_path / "model.safetensors")
    publish = ["publish", tmp_path / "model.safetensors", tmp_path / "chain"]
    succeed(*publish, "--quantise", "fp8-block")
    newest = succeed("log", tmp_path / "chain")["versions"]
    for options in [[], ["--dry-run"], ["--full"], ["--resume-from", 1]]:
        assert "--quantise none" in fail(*publish, *options, kind="RecipeMissing")
    assert succeed("log", tmp_path / "chain")["versions"] == newest
    assert succeed(*publish, "--quantise", "none", "--dry-run")["kind"] == "anchor"


def test_weights_are_quantised_on_request(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    weights = [{"a.q_proj.weight": random.standard_normal((40, 64)).astype(np.float32), "norm.weight": np.ones(9, np.float32)}]
    weights.append({**weights[0], "a.q_proj.weight": weights[0]["a.q_proj.weight"] * np.float32(0.99)})
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder, tensors in zip(folders, weights, strict=True):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text('{"torch_dtype": "float32"}')
    first = succeed("publish", folders[0], tmp_path / "chain", "--quantise", "fp8-block")
    assert (first["recipe"]["name"], first["warnings"]) == ("fp8-block", [])
    planned = succeed("publish", folders[1], tmp_path / "chain", "--quantise", "fp8-block", "--dry-run")
    second = succeed("publish", folders[1], tmp_path / "chain", "--quantise", "fp8-block", "--if-changed")
    assert (planned["kind"], planned["changed"]) == (second["kind"], second["changed"])
    assert (second["kind"], second["elements"], second["weight_bytes"]) == ("delta", 40 * 64 + 1 + 9, 40 * 64 + 4 + 18)
    assert not succeed("publish", folders[1], tmp_path / "chain", "--quantise", "fp8-block", "--if-changed")["published"]
    assert (planned["recipe"]["name"], planned["quantised"], planned["elements"]) == ("fp8-block", 40 * 64, 40 * 64 + 9)
    [warning] = succeed("publish", folders[1], tmp_path / "chain", "--quantise", "fp8-tensor")["warnings"]
    assert "fp8-block (release 1)" in warning
    assert [version["recipe"]["name"] for version in succeed("log", tmp_path / "chain")["versions"]] == ["fp8-tensor", *["fp8-block"] * 2]
    assert not re.search(r"^· .*[0-9]×  +[0-9.k]+  +[>0-9]", run("log", tmp_path / "chain").stdout, re.M)  # a share "in %" assumes 16 bits
    assert "quantised by fp8-block (release 1)" in " ".join(run("show", tmp_path / "chain", 2).stdout.split())
    succeed("pull", tmp_path / "chain", tmp_path / "out", "--at", 2)
    before = quantise_state(weights[0], "fp8-block")
    assert_same(load_checkpoint(tmp_path / "out"), quantise_state(weights[1], "fp8-block", before))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["torch_dtype"], config["quantization_config"]["weight_block_size"]) == ("bfloat16", [128, 128])
    wrong = [["--quantise", "fp7"], ["--quantise", "int4", "--allow-nonfinite"], ["--ignore", "a"]]
    for usage in [*wrong, *(["--quantise", "int4", "--ignore", pattern] for pattern in ("re:(", "re:a\tb", "a" * 9000, ""))]:
        done = run("publish", folders[0], tmp_path / "new", *usage)
        assert (done.returncode, usage[-2] in done.stderr or usage[-1] in done.stderr) == (2, True)
    options = ["--quantise", "int4", "--ignore", "q_proj", "--ignore", "a.q_proj.weight", "--ignore", "b", "--dry-run"]
    [warning] = succeed("publish", folders[0], tmp_path / "new", *options)["warnings"]
    assert "match no layer, so they change nothing: 'q_proj', 'a.q_proj.weight', 'b'. A pattern is the full name of a layer" in warning
    planned = succeed("publish", folders[0], tmp_path / "new", "--quantise", "int4", "--ignore", "re:.*q_proj$", "--dry-run")
    [warning] = planned["warnings"]
    assert "none of these weights" in warning
    assert "'a.q_proj.weight', because the pattern 're:.*q_proj$' matches its layer; 'norm.weight', because it has 1 dim" in warning
    assert planned["bytes"] == 2 * (40 * 64 + 9)
    save_file({"a.q_proj.weight": np.ones((4, 33), np.float32)}, tmp_path / "odd.safetensors")
    fail("publish", tmp_path / "odd.safetensors", tmp_path / "new", "--quantise", "int4", kind="UnquantisableWeight")
    refused = fail("publish", tmp_path / "out", tmp_path / "new", "--quantise", "fp8-block", kind="UnquantisableWeight")
    assert "quantised already" in refused
    save_file({"a.q_proj.weight": np.full((4, 32), np.nan, np.float32)}, tmp_path / "nan.safetensors")
    refused = fail("publish", tmp_path / "nan.safetensors", tmp_path / "new", "--quantise", "int4", kind="NonFiniteWeights")
    assert "--allow-nonfinite" not in refused  # it does not help with a recipe
    assert not (tmp_path / "new").exists()
