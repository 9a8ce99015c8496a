"""States may contain torch tensors of every type and layout on the CPU. All other tensors are refused, and the error names them."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
from support import CODECS, run_python

import deltawire
from deltawire.codec import using_codec
from deltawire.codec.base import EncodeGroup
from deltawire.codec.bits import DeviceBits, on_gpu
from deltawire.dtypes import PAYLOAD_TYPES
from deltawire.errors import StateNotWritable, UnsupportedDtype, UnsupportedTensor
from deltawire.tensors.bits import tensor_bits
from deltawire.tensors.columns import Columns
from deltawire.tensors.gpu_handover import GpuHandover
from deltawire.tensors.torch_types import TORCH_NAMES

torch = pytest.importorskip("torch")

KNOWN = [name for name in TORCH_NAMES if hasattr(torch, name)]


def random_tensor(name, shape, seed=0):
    """Return a tensor of this type with random bits."""
    dtype = getattr(torch, name)
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    if name == "bool":
        raw &= 1
    return torch.from_numpy(raw.reshape(-1)).view(dtype).reshape(shape)


def bits_of(state):
    """Return types, shapes and bytes, found with torch alone."""
    return {
        name: (tensor.dtype, tuple(tensor.shape), tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in state.items()
    }


def flipped(tensor, every=7):
    """Return a contiguous copy in which every few elements have their lowest bit flipped."""
    new = tensor.detach().clone(memory_format=torch.contiguous_format)
    signed = new.reshape(-1).view(getattr(torch, f"int{8 * tensor.element_size()}"))
    signed[::every] ^= 1
    return new


def check(base, new):
    """Check that every codec turns clones of the base, with the same layout, into the new state, without replacing a tensor."""
    expected, before = bits_of(new), bits_of(base)
    delta = deltawire.encode_delta(base, new)
    for codec in CODECS:
        with using_codec(codec):
            assert deltawire.encode_delta(base, new) == delta
            patch = deltawire.resolve_delta(base, delta)
            assert bits_of(base) == before
            for write in (lambda state: deltawire.apply_delta(state, delta), patch.apply):
                state = {name: tensor.detach().clone() for name, tensor in base.items()}
                tensors = dict(state)
                write(state)
                assert bits_of(state) == expected
                kept = [name for name in tensors if before[name][:2] == expected[name][:2]]
                assert all(state[name] is tensors[name] for name in kept)
    return delta


def test_every_type_that_torch_and_the_format_have_is_supported():
    assert len(KNOWN) == 16 or not hasattr(torch, "float8_e8m0fnu")
    for name in KNOWN:
        assert tensor_bits("x", random_tensor(name, (3,))).dtype.name == TORCH_NAMES[name]


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (300,), (40, 50), (0, 3), (2, 3, 4, 5)], ids=str)
def test_every_type_and_shape_makes_the_round_trip(name, shape):
    base = {"x": random_tensor(name, shape), "y": random_tensor(name, shape, 1)}
    check(base, {"x": flipped(base["x"]), "y": base["y"].clone()})


@pytest.mark.parametrize("name", KNOWN)
def test_torch_and_numpy_states_are_the_same_states(name):
    tensor = random_tensor(name, (40, 50))
    base, new = {"x": tensor}, {"x": flipped(tensor)}
    as_numpy = [{"x": np.array(tensor_bits("x", state["x"]).bits).view(tensor_bits("x", state["x"]).dtype.numpy)} for state in (base, new)]
    assert deltawire.state_digest(base) == deltawire.state_digest(as_numpy[0])
    delta = deltawire.encode_delta(base, new)
    assert deltawire.encode_delta(*as_numpy) == delta
    deltawire.apply_delta(as_numpy[0], delta)
    assert as_numpy[0]["x"].tobytes() == as_numpy[1]["x"].tobytes()


@pytest.mark.parametrize(
    "layout",
    [
        lambda t: t.T,
        lambda t: t[::2],
        lambda t: t[:, 3:-3],
        lambda t: t[5:, ::3],
        lambda t: t.unsqueeze(0).permute(2, 0, 1),
        lambda t: t[:, 7],
        lambda t: t.reshape(10, 6, 7, 10).to(memory_format=torch.channels_last),
    ],
)
@pytest.mark.parametrize("name", ["bfloat16", "float32", "uint8", "float8_e4m3fn"])
def test_views_of_any_layout_are_changed_in_place(layout, name):
    whole = random_tensor(name, (60, 70))
    base, new = {"x": layout(whole)}, {"x": flipped(layout(whole))}
    delta = check(base, new)
    state = {"x": layout(whole)}
    deltawire.apply_delta(state, delta)
    assert bits_of(state) == bits_of(new)


def test_parameters_that_require_gradients_are_changed_in_place():
    parameter = torch.nn.Parameter(torch.randn(30, 40))
    base, new = {"x": parameter}, {"x": parameter.detach() * 1.01}
    deltawire.apply_delta(base, deltawire.encode_delta(base, new))
    assert base["x"] is parameter
    assert parameter.requires_grad
    assert bits_of(base) == bits_of(new)
    (parameter * 2).sum().backward()
    assert parameter.grad is not None


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_of_a_module_are_encoded_once():
    torch.manual_seed(0)
    trainer, reader = Tied(), Tied()
    reader.load_state_dict(trainer.state_dict())
    base = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    base["head.weight"] = base["embed.weight"]
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.mul_(1.001)
        trainer.norm.num_batches_tracked += 1
    delta = deltawire.encode_delta(base, trainer.state_dict())
    assert len(delta) < deltawire.encode_delta(base, {name: t.clone() for name, t in trainer.state_dict().items()}).__len__() * 0.7
    deltawire.apply_delta(reader.state_dict(), delta)
    assert bits_of(reader.state_dict()) == bits_of(trainer.state_dict())
    assert reader.head.weight is reader.embed.weight
    untied = {name: tensor.clone() for name, tensor in base.items()}
    deltawire.apply_delta(untied, delta)
    assert bits_of(untied) == bits_of(trainer.state_dict())


@pytest.mark.parametrize("name", KNOWN)
def test_added_tensors_are_torch_tensors(name):
    base, new = {"x": torch.zeros(3)}, {"x": torch.zeros(3), "y": random_tensor(name, (4, 5)), "z": random_tensor(name, ())}
    delta = deltawire.encode_delta(base, new)
    patch = deltawire.resolve_delta(base, delta)
    for write in (lambda state: deltawire.apply_delta(state, delta), patch.apply):
        state = {"x": torch.zeros(3)}
        write(state)
        assert all(isinstance(tensor, torch.Tensor) for tensor in state.values())
        assert bits_of(state) == bits_of(new)
        state["y"].view(-1)[0] = 0  # writable


def test_tensors_added_to_numpy_states_are_arrays_even_with_torch_imported():
    state = {"x": np.zeros(3)}
    deltawire.apply_delta(state, deltawire.encode_delta({"x": torch.zeros(3, dtype=torch.float64)}, {"y": torch.ones(2)}))
    assert isinstance(state["y"], np.ndarray)
    assert state.keys() == {"y"}


def test_a_tensor_that_changes_type_is_replaced():
    base = {"x": torch.arange(6.0), "y": torch.arange(6.0)}
    check(base, {"x": torch.arange(6.0).bfloat16(), "y": torch.arange(6.0).reshape(2, 3)})


def test_expanded_and_overlapping_tensors_are_refused():
    base = {"x": torch.zeros(4, 5), "y": torch.zeros(4, 5)}
    delta = deltawire.encode_delta(base, {"x": torch.ones(4, 5), "y": torch.zeros(4, 5)})
    memory = torch.zeros(40)
    for state in (
        {"x": torch.zeros(5).expand(4, 5), "y": torch.zeros(4, 5)},
        {"x": torch.zeros(8).unfold(0, 5, 1), "y": torch.zeros(4, 5)},
        {"x": memory[:20].view(4, 5), "y": memory[10:30].view(4, 5)},
    ):
        with pytest.raises(StateNotWritable):
            deltawire.apply_delta(state, delta)
        assert all(not tensor.any() for tensor in state.values())


def freed(tensor):
    """Return a tensor whose memory was freed, as by trainers that shard parameters."""
    tensor.untyped_storage().resize_(0)
    return tensor


def unsupported():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about quantized, nested and sparse tensors
        return {
            "sparse": torch.eye(3).to_sparse(),
            "sparse rows": torch.eye(3).to_sparse_csr(),
            "meta": torch.zeros(3, device="meta"),
            "quantized": torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
            "nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
            "negated": torch.complex(torch.arange(6.0), torch.arange(6.0)).conj().imag,
            "zeros": torch._efficientzerotensor((3,)),
            "freed": freed(torch.ones(3)),
            "freed, transposed": freed(torch.ones(3, 2).T),
            "subclass": torch.zeros(3).as_subclass(type("Odd", (torch.Tensor,), {})),
        }


@pytest.mark.parametrize("kind", list(unsupported()))
def test_tensors_that_are_not_dense_cpu_memory_are_named(kind):
    state = {"fine": torch.zeros(3), "odd": unsupported()[kind]}
    for call in (
        lambda: deltawire.encode_delta(state, state),
        lambda: deltawire.state_digest(state),
        lambda: deltawire.encode_delta({}, state),
    ):
        with pytest.raises(UnsupportedTensor, match="'odd'"):
            call()


@pytest.mark.parametrize(
    "dtype", [torch.complex32, torch.complex64, torch.complex128, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz], ids=str
)
def test_unknown_types_are_named(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental
        tensor = torch.zeros(3, dtype=dtype)
    with pytest.raises(UnsupportedDtype, match=str(dtype)):
        deltawire.state_digest({"x": tensor})


def test_states_of_arrays_are_handled_while_another_thread_is_importing_torch(monkeypatch):
    base, new = {"x": np.zeros(9)}, {"x": np.ones(9), "y": np.ones(2)}
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    with GpuHandover(base, new).on_side_stream():
        deltawire.apply_delta(base, deltawire.encode_delta(base, new))
    assert deltawire.state_digest(base) == deltawire.state_digest(new)
    with pytest.raises(UnsupportedTensor, match="list"):
        deltawire.state_digest({"x": [1]})


def test_torch_may_be_imported_later_and_deltawire_never_imports_it():
    code = """
import sys
import numpy as np
import deltawire
base, new = {"x": np.zeros(9)}, {"x": np.ones(9), "y": np.ones(2)}
delta = deltawire.encode_delta(base, new)
deltawire.apply_delta(base, delta)
deltawire.state_digest(base)
assert "torch" not in sys.modules
import torch
state = {"x": torch.zeros(9, dtype=torch.float64)}
deltawire.apply_delta(state, delta)
print(type(state["y"]).__module__, deltawire.state_digest(state) == deltawire.state_digest(new))
"""
    assert run_python(code).split() == ["torch", "True"]


def test_torch_tensors_are_cast_to_the_same_bits_as_arrays():
    """The tensors include NaNs and halfway cases at every position of a vector."""
    words = np.random.default_rng(5).integers(0, 2**32, 4099, np.uint32)
    words[::37] |= 0x7F800000
    words[1::41] = 0x3F808000
    wide = words.view(np.float32)
    assert np.isnan(wide).sum() > 50
    base = {"w": np.zeros(wide.size, ml_dtypes.bfloat16)}
    for dtype in ("bfloat16", torch.bfloat16):
        assert deltawire.encode_delta(base, {"w": torch.from_numpy(wide)}, dtype=dtype) == deltawire.encode_delta(
            base, {"w": wide}, dtype=dtype
        )


@pytest.mark.parametrize("codec", CODECS)
def test_codecs_of_the_host_refuse_bits_on_a_gpu(codec):
    bits = DeviceBits(torch.zeros(4, dtype=torch.int16))  # it represents a CUDA tensor, because this machine may have no GPU
    array = np.zeros(4, np.uint16)
    assert on_gpu(bits)
    assert not on_gpu(array)
    assert not on_gpu(None)
    with using_codec(codec) as host:
        for use in (
            lambda: host.digest([bits], np.ones(1, np.uint64), 1),
            lambda: host.encode_groups([EncodeGroup(PAYLOAD_TYPES[9], [array], [bits], np.ones(1, np.uint64))], 1),
            lambda: host.write_elements(bits, np.zeros(1, np.int64), array[:1]),
        ):
            with pytest.raises(TypeError):
                use()


def test_only_two_functions_ask_whether_something_is_on_a_gpu():
    """All others call `on_gpu` for bits, or `gpu_of` or `gpu_holding` for tensors."""
    source = Path(deltawire.__file__).parent
    allowed = {source / "codec" / "bits.py", source / "tensors" / "torch_types.py"}
    question = re.compile(r"is_cuda|isinstance\([^()]*, DeviceBits\)")
    assert [path for path in source.rglob("*.py") if path not in allowed and question.search(path.read_text(encoding="utf-8"))] == []


def test_columns_of_torch_tensors_give_the_bytes_of_tensors_one_by_one(monkeypatch):
    """Tensors in host memory are read in columns, even if some are strided, tied, empty or parameters."""

    def state(seed):
        made = {f"w{number}": random_tensor(name, (3, 5), seed + number) for number, name in enumerate(KNOWN)}
        made["strided"] = random_tensor("bfloat16", (6, 8), seed)[::2, 1:]
        made["empty"] = torch.zeros(0, 4)
        made["parameter"] = torch.nn.Parameter(random_tensor("float32", (7,), seed))
        return made | {"tied": made["w0"], "head": made["parameter"]}

    base, new = state(1), state(100)
    found = Columns.of(base)
    assert found is not None
    assert not found.is_on_gpu
    quick = deltawire.encode_delta(base, new), deltawire.state_digest(base)
    with monkeypatch.context() as patch:
        patch.setattr(Columns, "of", classmethod(lambda cls, state: None))
        assert quick == (deltawire.encode_delta(base, new), deltawire.state_digest(base))
    deltawire.apply_delta(base, quick[0])
    assert bits_of(base) == bits_of(new)


def test_tensors_that_are_not_plain_memory_are_not_read_in_columns():
    complex_ = torch.randn(3, dtype=torch.complex64)
    others = [
        torch.ones(2, device="meta"),
        torch.eye(3).to_sparse(),
        complex_,
        complex_.conj().imag,
        torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        others.append(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    for tensor in [*others, freed]:
        assert Columns.of({"a": torch.ones(2), "w": tensor}) is None
