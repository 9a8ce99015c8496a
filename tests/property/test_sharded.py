"""A plain reader always has the whole model, bit for bit, for any tensors and numbers of ranks that change between versions."""

from __future__ import annotations

import secrets

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from plain_reader import read_states
from support import bits_of, copied
from thorough import examples
from threads_as_ranks import run_ranks, shards_of

from deltawire.dtypes import DTYPES
from deltawire.publish.sharded import ShardedPublisher
from deltawire.publish.writer_options import WriterOptions
from deltawire.store import open_store
from deltawire.tensors.bits import tensor_bits

shapes = st.lists(st.integers(0, 70), max_size=3).map(tuple)
models = st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.sampled_from(DTYPES), shapes), min_size=1)


def versions_of(model, seed, count):
    random = np.random.default_rng(seed)
    state = {
        name: np.frombuffer(random.bytes(int(np.prod(shape)) * dtype.itemsize), dtype.bits).copy().view(dtype.numpy).reshape(shape)
        for name, (dtype, shape) in model.items()
    }
    for _ in range(count):
        state = copied(state)
        for name, array in state.items():
            flat = tensor_bits(name, array).bits.reshape(-1)
            if flat.size:
                flat[random.integers(0, flat.size, 3)] ^= 1
        yield state


@examples(15)
@given(models, st.lists(st.integers(1, 5), min_size=2, max_size=3), st.integers(0, 2**32), st.sampled_from([1, 600, 1 << 20]))
def test_readers_have_every_version_whatever_the_ranks(model, sizes, seed, segment_bytes):
    url = f"memory://{secrets.token_hex(8)}"
    published = list(versions_of(model, seed, 2 * len(sizes)))
    for turn, size in enumerate(sizes):

        def work(ranks, size=size, turn=turn):
            with ShardedPublisher(ranks, url, options=WriterOptions(threads=1, segment_bytes=segment_bytes, shard_bytes=1000)) as publisher:
                for state in published[2 * turn : 2 * turn + 2]:
                    publisher.publish(shards_of(state, ranks.rank, size))

        assert run_ranks(size, work) == [None] * size
    assert [bits_of(state) for _, state in sorted(read_states(open_store(url)).items())] == [bits_of(state) for state in published]
