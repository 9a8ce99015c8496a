"""Every codec reads the golden files of rollouts, and writes them again byte for byte."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from blake3 import blake3
from make_rollouts import FOLDER, LAYOUT, rollouts
from support import CODECS

from deltawire.codec import using_codec
from deltawire.format.rollouts import Rollouts, sequences_of
from deltawire.format.routing import Routing

HASHES = {
    "experts.npy": "ad0da4126f4031498e19e41d4cf29a8780e4067dd7b36fed571a99c9e28820a1",
    "plain.safetensors": "46fd02aee64f9e6dd4486fd7a2965710ce211850c7e6bf52a3d26e691235cfa7",
    "routed.safetensors": "4bb0f378919918ce63f91f6f167a992c75bea654d6b13a0debd954a1d244e27b",
}


def test_golden_rollouts_are_untouched() -> None:
    assert {path.name: blake3(path.read_bytes()).hexdigest() for path in FOLDER.iterdir()} == HASHES


def test_rollouts_without_routing_are_written_as_before() -> None:
    data = (FOLDER / "plain.safetensors").read_bytes()
    assert rollouts()[0].to_bytes() == data == Rollouts.parse(data).to_bytes()
    assert Rollouts.parse(data).routing is None


@pytest.mark.parametrize("codec", CODECS)
def test_golden_routing_leads_to_what_is_on_record(codec: str) -> None:
    data = (FOLDER / "routed.safetensors").read_bytes()
    whole, experts = rollouts()
    with using_codec(codec):
        found = Rollouts.parse(data)
        assert found.routing is not None
        assert found.to_bytes() == data
        assert found.routing.layout == LAYOUT
        assert np.array_equal(np.concatenate(found.routing.experts()), np.load(FOLDER / "experts.npy"))
        assert 1 <= found.routing.broken < 20
        again = Routing.encode(LAYOUT, sequences_of(whole.prompts, whole.completions), experts)
        assert replace(whole, routing=again).to_bytes() == data
