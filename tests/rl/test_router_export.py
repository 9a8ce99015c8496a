"""Recorded experts for other trainers, compared with arrays written by hand."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from deltawire.errors import UnusableRouting
from deltawire.rl.routing.router_export import experts_for_megatron, experts_for_skyrl, experts_for_verl

FIRST = np.array([[[1, 2], [3, 4]], [[5, 6], [7, 0]], [[-1, -1], [-1, -1]]], np.int32)
"""Three tokens, two layers with routers, two experts per token. The last token has no record."""
SECOND = np.array([[[4, 3], [2, 1]]], np.int32)
MODEL = {"layers": (1, 3), "num_hidden_layers": 4, "num_experts": 8}


def test_megatron_gets_one_array_of_all_packed_tokens_for_each_layer():
    found = experts_for_megatron([FIRST, SECOND])
    assert [layer.dtype for layer in found] == [np.int64, np.int64]
    assert [layer.tolist() for layer in found] == [[[1, 2], [5, 6], [0, 1], [4, 3]], [[3, 4], [7, 0], [0, 1], [2, 1]]]
    assert all(layer.flags.c_contiguous for layer in found)


def test_verl_gets_all_layers_as_vllm_gives_them():
    found = experts_for_verl(FIRST, **MODEL)
    assert found.dtype == np.uint8
    assert found.tolist() == [[[0, 0], [1, 2], [0, 0], [3, 4]], [[0, 0], [5, 6], [0, 0], [7, 0]]]
    assert experts_for_verl(FIRST, **MODEL | {"num_experts": 384}).dtype == np.int16


def test_skyrl_gets_base64_of_little_endian_bytes():
    found = experts_for_skyrl(FIRST, **MODEL | {"num_experts": 300})
    assert found["shape"] == [2, 4, 2]
    assert found["dtype"] == "int16"
    by_hand = bytes([0, 0, 0, 0, 1, 0, 2, 0, 0, 0, 0, 0, 3, 0, 4, 0, 0, 0, 0, 0, 5, 0, 6, 0, 0, 0, 0, 0, 7, 0, 0, 0])
    assert base64.b64decode(found["data"]) == by_hand
    assert experts_for_skyrl(FIRST, **MODEL)["dtype"] == "uint8"


@pytest.mark.parametrize("row", [[-1, -1], [0, 0], [3, 3], [2, -1]])
def test_a_gap_is_refused(row):
    gap = FIRST.copy()
    gap[0, 1] = row
    for export in (
        lambda: experts_for_megatron([SECOND, gap]),
        lambda: experts_for_verl(gap, **MODEL),
        lambda: experts_for_skyrl(gap, **MODEL),
    ):
        with pytest.raises(UnusableRouting, match="the experts of token 0 of 3 were not recorded"):
            export()


def test_arrays_that_do_not_fit_are_refused():
    for wrong, why in ((FIRST[0], "integers"), (FIRST.astype(float), "integers"), (FIRST[:, :1], "1 layers were recorded")):
        with pytest.raises(UnusableRouting, match=why):
            experts_for_verl(wrong, **MODEL)
    with pytest.raises(UnusableRouting, match="2 of 3 are named"):
        experts_for_verl(FIRST, **MODEL | {"num_hidden_layers": 3})
    with pytest.raises(UnusableRouting, match="expert 7 was recorded"):
        experts_for_verl(FIRST, **MODEL | {"num_experts": 7})
    with pytest.raises(UnusableRouting, match="shapes"):
        experts_for_megatron([FIRST, SECOND[:, :1]])
    with pytest.raises(UnusableRouting, match="no sequence"):
        experts_for_megatron([])


@pytest.mark.parametrize("row", [[-1, -1], [0, 0]])
def test_only_the_last_token_may_have_no_record(row):
    gap = np.concatenate([FIRST, FIRST[:1], FIRST[2:]])
    gap[-2] = row  # the last token was drawn with these experts
    for wrong, token in ((gap, 2), (np.full((2, 2, 2), row[0]), 0), (np.concatenate([FIRST[2:], FIRST]), 0)):
        for export in (lambda it=wrong: experts_for_megatron([SECOND, it]), lambda it=wrong: experts_for_verl(it, **MODEL)):
            with pytest.raises(UnusableRouting, match=f"the experts of token {token} of {len(wrong)} were not recorded"):
                export()
    assert experts_for_verl(FIRST[2:], **MODEL).shape == (0, 4, 2)
