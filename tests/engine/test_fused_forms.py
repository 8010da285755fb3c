"""Which form a layer is recognised as, whatever its weights and whatever precision products are set to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import make_model, randomise
from fused import CONFIG, assert_like_hugging_face, fused_layers

from stoker.engine.layers import fused_forms, fused_model
from stoker.engine.layers.probe import Recorder
from stoker.rollout import RolloutEngine


def form_of(engine: RolloutEngine) -> list[Any]:
    """What was chosen for each layer."""
    names = (
        "interleaved",
        "rotary",
        "tempered",
        "grouped",
        "gate_act",
        "gate_first",
        "groups",
        "beta_scale",
        "by_key_head",
    )
    mixers = [b.mixer for layer in fused_layers(engine) for b in layer.branches if hasattr(b, "mixer")]
    norms = [getattr(getattr(mixer, "head_norm", None), "last", None) for mixer in mixers]
    return [[getattr(mixer, name, None) for name in names] for mixer in mixers] + norms


@pytest.mark.parametrize(("family", "rounded"), [("kimi_linear", False), ("bailing_hybrid", True)])
def test_in_half_precision_a_decay_is_rounded_where_the_layer_rounds_its_own(family: str, rounded: bool) -> None:
    with RolloutEngine(make_model(family).bfloat16(), config=CONFIG) as engine:
        mixers: list[Any] = [layer.branches[0] for layer in fused_layers(engine)]
        assert [getattr(m.mixer, "rounded", None) for m in mixers] == [rounded, None, rounded]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["hunyuan_v1_dense", "llama", "cohere2", "qwen3_5", "granite", "gemma4"])
def test_weights_that_hide_what_a_layer_does(family: str, dtype: torch.dtype) -> None:
    """Norms of ones, whose order with a rotation is no matter, and branches that add nothing, before training begins."""
    model = make_model(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif parameter.dim() == 1 and "norm" in name:
                parameter.fill_(1.0)
    with RolloutEngine(model.to(dtype), config=CONFIG) as engine:
        assert engine.stats().fused_layers == engine.stats().num_layers
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            randomise(model)
        engine.update_weights()
        if dtype == torch.float32:
            assert_like_hugging_face(engine, model)
        with RolloutEngine(make_model(family), config=CONFIG) as other:
            assert form_of(engine) == form_of(other)


def _bound(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As Step 3.7's, whose bounds are no matter to what is random."""
    return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=16.0) * self.up_proj(x).clamp(-16.0, 16.0))


@pytest.mark.parametrize(
    ("family", "fields", "bounded"),
    [
        ("llama", {"hidden_act": "gelu_10"}, None),
        ("starcoder2", {"hidden_act": "relu6"}, None),
        ("qwen3_moe", {"hidden_act": "gelu_10"}, None),  # of experts
        ("llama4", {"hidden_act": "gelu_10"}, None),  # that all tokens run through
        ("llama", {}, "mlp"),
        ("glm4_moe", {}, "mlp.shared_experts"),
    ],
)
def test_bounds_that_no_number_is_beyond_yet(
    family: str, fields: dict[str, Any], bounded: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(family, **fields)
    if bounded is not None:
        monkeypatch.setattr(type(model.model.layers[1].get_submodule(bounded)), "forward", _bound)
    with RolloutEngine(model, config=CONFIG) as engine, torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and any(part in name for part in ("gate_proj", "gate_up_proj", "up_proj", "c_fc")):
                parameter *= 12
        engine.update_weights()
        assert_like_hugging_face(engine, model)


@pytest.mark.parametrize("said_by", ["the older setting", "the newer one", "the one for all", "nobody"])
def test_layers_are_compared_in_full_precision(monkeypatch: pytest.MonkeyPatch, said_by: str) -> None:
    """A product of TF32, which a trainer may have asked for, is off by a hundred times what a layer in fp32 may be off by."""
    settings, seen = torch.backends.cuda.matmul, set[str]()

    class Noting(Recorder):
        def attend(self, *args: Any, **options: Any) -> torch.Tensor:
            seen.add(settings.fp32_precision)
            return super().attend(*args, **options)

    for module in (fused_forms, fused_model):
        monkeypatch.setattr(module, "Recorder", Noting)
    try:
        if said_by == "the older setting":
            torch.set_float32_matmul_precision("high")
        elif said_by == "the newer one":
            settings.fp32_precision = "tf32"
        elif said_by == "the one for all":
            torch.backends.fp32_precision = "tf32"
        before = settings.fp32_precision
        with RolloutEngine(make_model("llama"), config=CONFIG):
            assert seen == {"ieee"}
            assert settings.fp32_precision == before
            if said_by == "the older setting":
                assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
        settings.fp32_precision = "none"


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["cohere2", "llama4"])
def test_the_default_dtype_chooses_no_other_form(family: str, default: torch.dtype) -> None:
    model = make_model(family)
    with RolloutEngine(model, config=CONFIG) as engine:
        expected = form_of(engine)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(default)
        with RolloutEngine(model, config=CONFIG) as engine:
            assert form_of(engine) == expected
            assert engine.stats().fused_layers == engine.stats().num_layers
    finally:
        torch.set_default_dtype(before)
