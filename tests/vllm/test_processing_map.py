"""Processing after loading is learnt as a permutation, or refused: small methods that do what vLLM's kernels do, or worse."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from loaded_models import import_vllm

pytestmark = pytest.mark.slow

Process = Callable[[Any, Any], None]


def processed(process: Process, **parameters: Any) -> Any:
    """Return a module that has been loaded with these values and processed, as vLLM does it. It has the raw values in `raw`."""
    import torch

    import_vllm()
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    class Kernel:
        def __init__(self) -> None:
            self.held: Any = None

    class Method(QuantizeMethodBase):  # type: ignore[misc]
        def __init__(self) -> None:
            self.moe_kernel: Any = None
            self.kernel = Kernel()

        def create_weights(self, *_: Any, **__: Any) -> None: ...

        def apply(self, *_: Any, **__: Any) -> Any: ...

        def process_weights_after_loading(self, layer: Any) -> None:
            process(self, layer)

    module = torch.nn.Module()
    for name, tensor in parameters.items():
        module.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    module.quant_method = Method()
    module.constant = torch.ones(8)
    record_metadata_for_reloading(module)
    vars(module)["raw"] = {"values": parameters}  # not a tensor attribute, so learning does not see it
    with torch.no_grad():
        module.quant_method.process_weights_after_loading(module)
    return module


def learn(module: Any) -> Any:
    """Learn a module, and check each map with the values that the module was loaded with. The module must not change."""
    import torch

    from deltawire.engines.vllm.layout.position_decoder import is_predicted
    from deltawire.engines.vllm.layout.processing_map import holds_for, learn_module, tensors_of
    from deltawire.engines.vllm.layout.unit_values import Fill, storage_units

    names = list(module.raw["values"])
    before = {path: storage_units(tensor, 8).clone() for path, tensor in tensors_of(module).items()}
    places = {path: tensor.data_ptr() for path, tensor in tensors_of(module).items()}
    found = learn_module(module, _current(), names)
    assert {path: tensor.data_ptr() for path, tensor in tensors_of(module).items()} == places
    assert all(torch.equal(storage_units(tensor, 8), before[path]) for path, tensor in tensors_of(module).items())
    for name, maps in found.maps.items():
        raw = storage_units(module.raw["values"][name], 8)
        for each in maps:
            fill = raw.view(getattr(torch, f"int{max(8, each.unit_bits)}"))
            assert is_predicted([each], tensors_of(module)[each.path], Fill(fill.numel(), functools.partial(_part, fill))), (name, each)
    assert holds_for(module, _current(), found)
    check_views(module, found)
    return found


def check_views(module: Any, found: Any) -> bool:
    """Return whether the processing of a module only makes views. Then what was learnt from values must say the same."""
    from deltawire.engines.vllm.layout.processing_views import learn_views

    views = learn_views(module, _current(), list(module.raw["values"]))
    assert views is None or (views.maps == found.maps and not found.arithmetic)
    return views is not None


def _part(words: Any, start: int, end: int) -> Any:
    return words[start:end]


def _current() -> Any:
    from vllm.config import VllmConfig

    return VllmConfig()


def values(*shape: int, kind: str = "bfloat16", seed: int = 3) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    if kind in ("int32", "uint8"):
        return torch.randint(0, 256, (*shape[:-1], shape[-1] * (4 if kind == "int32" else 1)), dtype=torch.uint8, generator=generator).view(
            getattr(torch, kind)
        )
    return torch.randn(*shape, generator=generator).to(getattr(torch, kind))


def put(layer: Any, name: str, tensor: Any) -> None:
    """Replace a parameter, as vLLM does."""
    import torch

    delattr(layer, name)
    layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))


def test_untouched_and_transposed_parameters_need_few_runs() -> None:
    def process(method: Any, layer: Any) -> None:
        put(layer, "weight", layer.weight.t())

    module = processed(process, weight=values(16, 24), scale=values(100, kind="float32"))
    found = learn(module)
    assert check_views(module, found)
    assert found.arithmetic == {}
    assert found.maps["weight"][0].nests[0].targets == (1,), "a transposed view has the storage of the checkpoint"
    assert found.runs == 4
    assert ("constant",) in found.constant


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"])
def test_tiles_with_padding_are_one_nest(kind: str) -> None:
    def process(method: Any, layer: Any) -> None:
        weight = layer.weight.data
        tiles = weight.new_empty(4, 40, 8).zero_() if weight.element_size() > 1 else weight.new_zeros(4, 40, 8)
        tiles[:, :32].copy_(weight.view(32, 4, 8).transpose(0, 1))
        put(layer, "weight", tiles)

    found = learn(processed(process, weight=values(32, 32, kind=kind)))
    (only,) = found.maps["weight"]
    assert found.arithmetic == {}
    assert [(nest.sizes, nest.sources, nest.targets) for nest in only.nests] == [((32, 4, 8), (32, 8, 1), (8, 320, 1))]


def test_the_swizzled_block_scales_of_nvfp4_are_one_nest() -> None:
    def process(method: Any, layer: Any) -> None:
        rows, columns = layer.scale.shape
        tiles = layer.scale.data.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4)
        put(layer, "scale", tiles.contiguous().reshape(rows, columns))

    found = learn(processed(process, scale=_positive(256, 16)))
    (only,) = found.maps["scale"]
    assert found.arithmetic == {}
    assert len(only.nests) == 1
    assert len(only.nests[0].sizes) <= 6


def _positive(*shape: int) -> Any:
    import torch

    return values(*shape, kind="float32").abs().clamp(0.1).to(torch.float8_e4m3fn)


def test_four_bit_values_move_and_change_by_a_table() -> None:
    def process(method: Any, layer: Any) -> None:
        import torch

        raw = layer.weight_packed.data.view(torch.uint8).view(16, -1)
        halves = torch.stack([raw & 15, raw >> 4], -1).view(16, -1)
        turned = (halves ^ 8).t().contiguous()
        put(layer, "weight_packed", (turned[:, ::2] | (turned[:, 1::2] << 4)).contiguous())

    found = learn(processed(process, weight_packed=values(16, 4, kind="int32")))
    (only,) = found.maps["weight_packed"]
    assert only.unit_bits == 4
    assert only.table == tuple(value ^ 8 for value in range(16))
    assert [nest.sizes for nest in only.nests] == [(16, 32)]


@pytest.mark.parametrize("kind", ["int32", "bfloat16"])
def test_learning_in_small_pieces_gives_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import_vllm()
    from deltawire.engines.vllm.layout import position_decoder, processing_map, unit_values

    def process(method: Any, layer: Any) -> None:
        import torch

        raw = layer.weight_packed.data.view(torch.uint8).view(16, -1)
        halves = torch.stack([raw & 15, raw >> 4], -1).view(16, -1) if kind == "int32" else layer.weight_packed.data
        turned = halves.t().contiguous()
        put(layer, "weight_packed", (turned[:, ::2] | (turned[:, 1::2] << 4)).contiguous() if kind == "int32" else turned)

    module = processed(process, weight_packed=values(16, 5, kind=kind), other=values(70, kind="float32"))
    whole = learn(module)
    for owner in (unit_values, position_decoder):
        monkeypatch.setattr(owner, "PIECE", 6)
    monkeypatch.setattr(processing_map._Study, "_is_memory_scarce", lambda study: True)
    assert learn(module).maps == whole.maps
    assert whole.arithmetic == {}
    assert len(whole.maps["weight_packed"][0].nests) == 1


def test_bytes_that_are_packed_into_wider_integers_stay_bytes() -> None:
    def process(method: Any, layer: Any) -> None:
        import torch

        put(layer, "weight", layer.weight.data.t().contiguous().view(torch.int32))

    found = learn(processed(process, weight=values(16, 32, kind="float8_e4m3fn")))
    assert found.arithmetic == {}
    assert found.maps["weight"][0].unit_bits == 8


def test_requantising_with_the_largest_scale_is_arithmetic_although_equal_scales_hide_it() -> None:
    def process(method: Any, layer: Any) -> None:
        import torch

        largest = layer.scale.max()
        weight = layer.weight.float().view(2, -1) * (layer.scale / largest)[:, None]
        put(layer, "weight", weight.view(layer.weight.shape).to(torch.float8_e4m3fn))
        put(layer, "scale", largest)

    import torch

    found = learn_only(processed(process, weight=values(16, 32, kind="float8_e4m3fn"), scale=torch.tensor([0.5, 0.25])))
    assert set(found.arithmetic) == {"weight", "scale"}
    assert not found.maps["weight"]
    assert not found.maps["scale"]


def test_a_weight_that_is_rounded_only_with_some_scales_is_arithmetic() -> None:
    """vLLM multiplies fp8 weights by their scale in float16 and divides them again. Only small scales lose bits."""

    def process(method: Any, layer: Any) -> None:
        import torch

        scaled = (layer.weight.to(torch.float16) * layer.scale.to(torch.float16)).float()
        put(layer, "weight", (scaled / layer.scale).to(torch.float8_e4m3fn))

    import torch

    found = learn_only(processed(process, weight=values(16, 32, kind="float8_e4m3fn"), scale=torch.tensor(0.5)))
    assert set(found.arithmetic) == {"weight", "scale"}
    assert not found.maps["weight"]


def learn_only(module: Any) -> Any:
    from deltawire.engines.vllm.layout.processing_map import learn_module

    found = learn_module(module, _current(), list(module.raw["values"]))
    check_views(module, found)
    return found


def test_a_number_that_is_computed_from_a_parameter_is_arithmetic() -> None:
    def process(method: Any, layer: Any) -> None:
        layer.scale_as_float = layer.scale.item()

    import torch

    found = learn_only(processed(process, scale=torch.tensor(0.5)))
    assert "scale_as_float" in found.arithmetic["scale"]
    assert found.maps["scale"][0].path == ("scale",), "it can be read, but a change needs more than a write"


@pytest.mark.parametrize(("times", "is_learnt"), [(4, True), (16, False)])
def test_scales_that_are_repeated_have_several_places(times: int, is_learnt: bool) -> None:
    def process(method: Any, layer: Any) -> None:
        put(layer, "scale", layer.scale.data.repeat_interleave(times, 0))

    found = learn_only(processed(process, scale=values(6, 40, kind="float32").abs()))
    assert len(found.maps["scale"]) == (times if is_learnt else 0)
    assert ("scale" in found.arithmetic) is not is_learnt


def test_two_parameters_in_one_tensor_are_both_found() -> None:
    def process(method: Any, layer: Any) -> None:
        import torch

        put(layer, "gate", torch.cat([layer.gate.data, layer.up.data.t()]))
        del layer.up

    found = learn(processed(process, gate=values(16, 24), up=values(24, 16)))
    assert found.arithmetic == {}
    assert {name: maps[0].path for name, maps in found.maps.items()} == {"gate": ("gate",), "up": ("gate",)}


def test_tensors_of_kernels_are_found_too() -> None:
    def process(method: Any, layer: Any) -> None:
        method.kernel.held = layer.weight.data.t().contiguous()
        del layer.weight

    found = learn(processed(process, weight=values(8, 24)))
    assert [each.path for each in found.maps["weight"]] == [("quant_method", "kernel", "held")]


def test_a_method_that_skips_packing_the_second_time_is_learnt_as_it_packed_the_first_time() -> None:
    def process(method: Any, layer: Any) -> None:
        if method.moe_kernel is None:
            put(layer, "w13_weight", layer.w13_weight.data.t().contiguous())
            method.moe_kernel = object()

    module = processed(process, w13_weight=values(8, 24))
    kernel = module.quant_method.moe_kernel
    found = learn(module)
    assert found.maps["w13_weight"][0].nests[0].sizes == (8, 24)
    assert module.quant_method.moe_kernel is kernel


def test_processing_that_writes_to_attributes_does_not_reach_the_live_module() -> None:
    def process(method: Any, layer: Any) -> None:
        layer.constant.copy_(layer.weight.data.float().view(-1)[:8])

    found = learn(processed(process, weight=values(8, 24)))
    widened = next(each for each in found.maps["weight"] if each.path == ("constant",))
    assert (widened.unit_bits, widened.nests[0].targets) == (16, (2,)), "bfloat16 is the upper half of float32"


def test_processing_that_changes_the_live_module_is_not_learnt() -> None:
    from deltawire.engines.vllm.layout.processing_map import NotLearnt

    modules: list[Any] = []

    def process(method: Any, layer: Any) -> None:
        for module in modules:
            module.quant_method.seen = object()

    module = processed(process, weight=values(8, 24))
    modules.append(module)
    with pytest.raises(NotLearnt, match="live module"):
        learn_only(module)


def test_processing_that_fails_on_copies_is_not_learnt() -> None:
    from deltawire.engines.vllm.layout.processing_map import NotLearnt

    runs: list[int] = []

    def process(method: Any, layer: Any) -> None:
        runs.append(1)
        if len(runs) > 1:
            raise ValueError("the weights were processed already")

    with pytest.raises(NotLearnt, match="processed already"):
        learn_only(processed(process, weight=values(8, 24)))


def test_a_result_that_moves_most_numbers_but_rounds_some_is_arithmetic() -> None:
    def process(method: Any, layer: Any) -> None:
        put(layer, "weight", layer.weight.data.clamp(-1.5, 1.5).t().contiguous())

    found = learn_only(processed(process, weight=values(16, 24)))
    assert found.maps["weight"] == []
    assert "weight" in found.arithmetic


def test_a_result_with_a_part_that_depends_on_large_numbers_only_is_arithmetic() -> None:
    def process(method: Any, layer: Any) -> None:
        import torch

        large = (layer.weight.data.abs() > 1).sum().to(torch.bfloat16).view(1)
        put(layer, "weight", torch.cat([layer.weight.data.t().reshape(-1), large]))

    found = learn_only(processed(process, weight=values(16, 24)))
    assert found.maps["weight"] == []


def test_sums_and_shuffles_are_arithmetic() -> None:
    def process(method: Any, layer: Any) -> None:
        import torch

        order = torch.randperm(layer.weight.shape[0], generator=torch.Generator().manual_seed(5))
        layer.sums = layer.weight.data.float().sum(1)
        put(layer, "weight", layer.weight.data[order])

    found = learn_only(processed(process, weight=values(200, 24)))
    assert found.maps["weight"] == []
    assert "sums" in found.arithmetic["weight"]


def test_a_live_tensor_that_is_not_a_view_is_learnt_from_values() -> None:
    def process(method: Any, layer: Any) -> None:
        put(layer, "weight", layer.weight.t())

    module = processed(process, weight=values(16, 24))
    assert check_views(module, learn_only(module))
    module.weight.data = module.weight.data.contiguous()
    assert not check_views(module, learn_only(module)), "other code has copied the weights"


def test_results_that_depend_on_values_outside_the_chain_are_left_alone_or_refused() -> None:
    """Some methods make parameters that no checkpoint has, and never set their values."""
    import types

    import torch

    from deltawire.engines.vllm.layout.types import ModuleRule
    from deltawire.engines.vllm.modules.recompute import process_again
    from deltawire.errors import EngineRefused

    def process(method: Any, layer: Any) -> None:
        put(layer, "scale", layer.scale.max() * (layer.unset if layer.uses_unset else 1))
        put(layer, "unset", 1 / layer.unset)

    def changes(uses_unset: bool, old: list[float], new: list[float]) -> Any:
        def prepare(method: Any, layer: Any) -> None:
            layer.uses_unset = uses_unset
            process(method, layer)

        module = processed(prepare, scale=torch.tensor(old), unset=torch.tensor(0.25))
        constant = learn_only_scale(module).constant
        layout = types.SimpleNamespace(
            tensors={}, raw=lambda _, read: {"scale": read("scale")}, constant=lambda _: {".".join(path) for path in constant}
        )
        model = types.SimpleNamespace(get_submodule=lambda _: module)
        rule = ModuleRule("layer", "reprocess", ("scale",), "")
        return process_again(model, _current(), layout, rule, lambda _: torch.tensor(new), lambda _: torch.tensor(old))

    (scatter,) = changes(False, [1.0, 2.0], [3.0, 2.0])
    assert scatter.new.view(torch.float32).tolist() == [3.0]
    with pytest.raises(EngineRefused, match="does not give the weights that module 'layer' has"):
        changes(True, [1.0, 2.0], [3.0, 2.0])


def learn_only_scale(module: Any) -> Any:
    from deltawire.engines.vllm.layout.processing_map import learn_module

    return learn_module(module, _current(), ["scale"])
