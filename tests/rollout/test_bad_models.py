"""Models, folders and configurations that an engine cannot run are refused by name, and what looks like one is not.

Both leave the model as it was.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from adapted import expected_tokens, peft_model, tokens
from families import make_model
from family_fields import VOCAB
from hybrid_fields import REFUSED
from peft import IA3Config, get_peft_model
from small_engine import llama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    create_causal_mask,
    or_masks,
    sliding_window_causal_mask_function,
)
from transformers.models.llama import modeling_llama
from usable import CONFIG, PROMPT, assert_usable

from stoker.engine.attention import MaskRule
from stoker.kernels.errors import (
    EngineStateError,
    InvalidConfigError,
    UnsupportedModelError,
    WeightsMovedError,
)
from stoker.kernels.reference.attention_plan import Visibility
from stoker.rollout import EngineConfig, RolloutEngine


def t5() -> nn.Module:
    return T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))


def small_llama_config(**fields) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, **fields
    )


def bert() -> nn.Module:
    return BertForMaskedLM(
        BertConfig(vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    )


def on_meta() -> nn.Module:
    model = llama()  # before, for others have it too
    with torch.device("meta"):
        return type(model)(model.config)


def half_offloaded() -> nn.Module:
    model = make_model("llama")
    model.lm_head.to("meta")
    return model


def zero_3() -> nn.Module:
    model = make_model("llama")
    model.lm_head.weight.data = torch.empty(0)
    return model


def of_a_library() -> nn.Module:
    model = make_model("llama")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().as_subclass(type("Packed", (torch.Tensor,), {})))
    return model


def mixed_dtypes() -> nn.Module:
    model = make_model("llama")
    model.lm_head.to(torch.bfloat16)
    return model


def with_a_module_more() -> nn.Module:
    model = make_model("llama")
    model.value_head = nn.Linear(48, 1)
    return model


def with_a_module_replaced() -> nn.Module:
    model = make_model("llama")
    model.lm_head = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, VOCAB))
    return model


def of_type(kind: str, **fields) -> nn.Module:
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | fields))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: of_type("bert", intermediate_size=16), r"layer 0 is not plain causal attention: BertSelfAttention"),
        (lambda: of_type("doge", intermediate_size=16), r"^DogeForCausalLM does not run.*computes with masks, by"),
        (
            lambda: of_type("diffllama", intermediate_size=16, num_key_value_heads=2),
            r"^DiffLlamaForCausalLM.*layer 0 attends more than once.*use model.generate",
        ),
        (
            lambda: of_type("nemotron", intermediate_size=16, num_key_value_heads=4),
            r"^NemotronForCausalLM does not run.*NemotronAttention does not pass the forward's keywords on.*use model.generate",
        ),
        (
            lambda: of_type("opt", ffn_dim=16, word_embed_proj_dim=16),
            r"^OPTForCausalLM does not run in the engine \(its code fails on the tokens of several sequences in one row, without "
            r"masks, with TypeError: ",
        ),
        (
            lambda: make_model("minimax"),
            r"^MiniMaxForCausalLM does not run in the engine \(its cache would need '\w+', for more than keys, values and",
        ),
        (lambda: of_type("modernbert-decoder", intermediate_size=16, pad_token_id=0), r"has no base model besides its"),
        (  # whose attention is not told of its window
            lambda: of_type("phimoe", intermediate_size=16, num_key_value_heads=2, sliding_window=8),
            r"^PhimoeForCausalLM: the mask of layer 0 shows token 8 other keys.*set EngineConfig\(max_model_len=8\), or",
        ),
        (
            lambda: of_type("mpt", d_model=16, n_heads=4, n_layers=2),
            r"^MptForCausalLM does not route.*: use model.generate",
        ),
        (t5, r"^T5ForConditionalGeneration is an encoder and a decoder"),
        (lambda: nn.Linear(2, 2), r"^Linear is no transformers causal language model"),
        (
            lambda: AveragedModel(llama()),
            r"^AveragedModel is no transformers causal language model: give its \.module$",
        ),
        (nn.Identity, r"^Identity has no parameters"),
        (lambda: LlamaModel(small_llama_config()), r"^LlamaModel is no transformers causal language model"),
        (
            lambda: AutoModelForSequenceClassification.from_config(small_llama_config(pad_token_id=0)),
            r"^LlamaForSequenceClassification is no transformers causal language model",
        ),
        (bert, r"^BertForMaskedLM is no transformers causal language model"),
        (on_meta, r"holds no data here.*give a model with its parameters in memory"),
        (half_offloaded, r"^parameter lm_head.weight of LlamaForCausalLM holds no data"),
        (zero_3, r"^parameter lm_head.weight of LlamaForCausalLM holds no data"),
        (of_a_library, r"^parameter lm_head.weight of LlamaForCausalLM is a Packed: the engine runs plain weights"),
        (mixed_dtypes, r"several dtypes.*bfloat16.*set EngineConfig\(dtype=...\) to one of them"),
        (with_a_module_more, r"unknown \['value_head.bias', 'value_head.weight'\].*Give the plain model"),
        (with_a_module_replaced, r"missing \['lm_head.weight'\]|transformers causal language model"),
        (
            lambda: get_peft_model(make_model("llama"), IA3Config(task_type="CAUSAL_LM")),
            r"adapter of type IA3.*or merge this one where PEFT can",
        ),
        *((lambda f=f: make_model(f), r"use model.generate for ") for f in REFUSED),
    ],
)
def test_models_that_are_refused(make, message):
    model = make()
    before = {n: p.data_ptr() for n, p in model.named_parameters()}
    with pytest.raises(UnsupportedModelError, match=message):
        RolloutEngine(model, config=CONFIG)
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == before


@pytest.mark.parametrize("of_the_model", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "granitemoehybrid"])
def test_experts_in_a_dtype_that_torch_does_not_multiply_them_in(family: str, of_the_model: bool):
    model = make_model(family)
    dtype = "auto" if of_the_model else "float64"
    message = rf"^{type(model).__name__} has experts.* in torch.float64: set EngineConfig\(dtype='float32'\)"
    with pytest.raises(UnsupportedModelError, match=message):
        RolloutEngine(model.double() if of_the_model else model, config=replace(CONFIG, dtype=dtype))
    with RolloutEngine(model, config=replace(CONFIG, dtype="float32")) as engine:
        engine.generate_batch([[1, 2, 3]])


def test_a_window_that_attention_is_not_told_of_may_be_as_long_as_the_sequences():
    model = of_type("phimoe", intermediate_size=16, num_key_value_heads=2, sliding_window=8)
    with RolloutEngine(model, config=replace(CONFIG, max_model_len=8)) as engine:
        engine.generate_batch([[1, 2, 3]])


@pytest.mark.parametrize(
    ("rule", "told", "first"),
    [
        (causal_mask_function, Visibility(), None),
        (causal_mask_function, Visibility(window=300), 300),
        (sliding_window_causal_mask_function(300), Visibility(window=300), None),
        (sliding_window_causal_mask_function(300), Visibility(window=299), 299),
        (sliding_window_causal_mask_function(1000), Visibility(), None),
        (chunked_causal_mask_function(128, torch.zeros(1, dtype=torch.long)), Visibility(chunk=128), None),
        (chunked_causal_mask_function(128, torch.zeros(1, dtype=torch.long)), Visibility(), 128),
        (bidirectional_mask_function, Visibility(), 0),
        (or_masks(causal_mask_function, lambda batch, head, query, key: key < 5), Visibility(), 0),
        (and_masks(causal_mask_function, lambda batch, head, query, key: key != 3), Visibility(), 3),
    ],
)
def test_masks_that_attention_knows_nothing_of_are_seen(rule, told, first):
    assert MaskRule(rule).first_difference(told, 1000, torch.device("cpu")) == first


def test_a_mask_of_what_tokens_are_is_refused(monkeypatch):
    """Blocks of tokens are known for those of a step alone."""
    blocks = torch.tensor([[0, 0]])
    with_blocks = partial(create_causal_mask, or_mask_function=blockwise_overlay(blocks))
    monkeypatch.setattr(modeling_llama, "create_causal_mask", with_blocks)
    with pytest.raises(
        UnsupportedModelError, match=r"^LlamaForCausalLM: the mask of layer 0 is no function of positions"
    ):
        RolloutEngine(make_model("llama"), config=CONFIG)


@pytest.fixture
def process_group(tmp_path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_ddp_is_looked_through(process_group):
    model = make_model("llama")
    wrapped = nn.parallel.DistributedDataParallel(model)
    with RolloutEngine(wrapped, config=CONFIG) as engine:
        assert_usable(engine, model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        ids = torch.tensor([PROMPT])
        wrapped(ids, labels=ids).loss.backward()
        optimizer.step()
        assert_usable(engine, model)


def test_a_class_that_fsdp2_put_in_front_of_peft_s_is_looked_through(process_group, monkeypatch):
    """FSDP2 gives a model a class of its own, also that of PEFT, in which the causal language model has to be found."""

    def interrupted(adapter: object) -> None:
        raise KeyboardInterrupt

    mesh = init_device_mesh("cpu", (1,))
    sharded = fully_shard(peft_model(), mesh=mesh)
    with RolloutEngine(sharded, config=CONFIG) as engine:
        assert engine.adapters == ("default",)
        expected = expected_tokens(peft_model())
        assert tokens(engine) == expected
        engine.sleep(level=2)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(engine._adapters, "place", interrupted)
            engine.wake_up()
        with pytest.raises(EngineStateError, match=r"asleep \(weights"):
            engine.generate_batch([PROMPT])  # by a slot that is empty, it would be the base's
        engine.wake_up()
        assert tokens(engine) == expected


def test_a_model_that_moves_to_another_dtype():
    model = make_model("llama")
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_usable(engine, model)
        for dtype in (torch.float64, torch.bfloat16):
            model.to(dtype)
            for call in (lambda: engine.generate_batch([PROMPT]), engine.update_weights) * 2:
                with pytest.raises(WeightsMovedError, match=rf"is now {dtype} on cpu.*built for torch.float32 on cpu"):
                    call()
            assert engine.weight_version == (0 if dtype == torch.float64 else 1)
            model.to(torch.float32)
            assert_usable(engine, model)


def test_a_layer_of_another_shape_is_noticed():
    model = make_model("llama")
    with RolloutEngine(model, config=CONFIG) as engine:
        layers = model.model.layers
        model.model.layers = layers[:1]
        for call in (lambda: engine.generate_batch([PROMPT]), engine.update_weights) * 2:
            with pytest.raises(UnsupportedModelError, match=r"missing \['model.layers.1"):
                call()
        model.model.layers = layers
        assert_usable(engine, model)
        other = make_model("llama", num_key_value_heads=4)
        inner, config = model.model, model.config
        model.model, model.config = other.model, other.config
        for call in (lambda: engine.generate_batch([PROMPT]), engine.update_weights) * 2:
            with pytest.raises(UnsupportedModelError, match=r"another shape.*build a new engine"):
                call()
        model.model, model.config = inner, config
        assert_usable(engine, model)


def test_a_vocabulary_that_grows_is_noticed():
    model = make_model("llama")
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_usable(engine, model)
        model.resize_token_embeddings(VOCAB + 8, mean_resizing=False)
        for call in (lambda: engine.generate_batch([PROMPT]), engine.update_weights) * 2:
            with pytest.raises(UnsupportedModelError, match=r"another shape.*build a new engine"):
                call()
        model.resize_token_embeddings(VOCAB)
        assert_usable(engine, model)


def test_a_constructor_that_is_interrupted_leaves_the_model_as_it_was(monkeypatch):
    model = make_model("llama")
    monkeypatch.setattr("stoker.rollout.shell_builder.fuse_layers", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        RolloutEngine(model, config=CONFIG)
    assert all(p.untyped_storage().resizable() for p in model.parameters())
    monkeypatch.undo()
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_usable(engine, model)


# -- configurations and folders -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device": "cuda"}, r"device=cuda and the model is on cpu: set device='auto'"),
        ({"device": "cpu:1"}, r"device=cpu:1 and the model is on cpu: set device='auto'"),
        ({"max_model_len": 257}, r"max_model_len=257 is beyond the model's 256 positions"),
        ({"kv_cache_memory": 1000}, r"kv_cache_memory=1000 holds no block: two blocks of 16 tokens take \d+ bytes"),
        ({"kv_cache_memory": "100TiB"}, r"kv_cache_memory='100TiB'"),
        ({"kv_cache_memory": 10**14}, r"no memory for the KV cache: \d+ bytes wanted.*kv_cache_memory"),
    ],
)
def test_a_configuration_that_does_not_fit_the_model_leaves_it_alone(fields, message):
    model = make_model("llama")
    before = {n: p.data_ptr() for n, p in model.named_parameters()}
    storages = {n: p.untyped_storage().resizable() for n, p in model.named_parameters()}
    with pytest.raises(InvalidConfigError, match=message):
        RolloutEngine(model, config=EngineConfig(**{"kv_cache_memory": "1MiB"} | fields))
    assert {n: p.untyped_storage().resizable() for n, p in model.named_parameters()} == storages
    if "kv_cache_memory" not in fields:
        assert {n: p.data_ptr() for n, p in model.named_parameters()} == before


def test_a_folder_that_is_no_model(tmp_path):
    with pytest.raises(InvalidConfigError, match=r"is no model folder \(no config.json in it\)"):
        RolloutEngine.from_pretrained(tmp_path / "nothing")
    llama().config.save_pretrained(tmp_path)
    with pytest.raises(InvalidConfigError, match=r"no file named model.safetensors"):
        RolloutEngine.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(InvalidConfigError, match=r"cannot be loaded"):
        RolloutEngine.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(InvalidConfigError, match=r"cannot be loaded"):
        RolloutEngine.from_pretrained(tmp_path)
    llama().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidConfigError, match=r"the tokenizer in .* cannot be loaded"):
        RolloutEngine.from_pretrained(tmp_path)
    if not torch.cuda.is_available():
        with pytest.raises(InvalidConfigError, match=r"cannot be loaded on cuda"):
            RolloutEngine.from_pretrained(tmp_path, tokenizer=None, config=EngineConfig(device="cuda"))


def test_a_quantised_folder_whose_package_lacks(tmp_path, monkeypatch):
    llama().save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(described))
    monkeypatch.setattr("transformers.quantizers.quantizer_gptq.is_optimum_available", lambda: False)
    with pytest.raises(InvalidConfigError, match=r"cannot be loaded on cpu: .*pip install optimum"):
        RolloutEngine.from_pretrained(tmp_path, config=EngineConfig(device="cpu"))


def test_a_checkpoint_with_a_tensor_missing_is_not_filled_up_at_random(tmp_path):
    model = make_model("llama")
    state = model.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(InvalidConfigError, match=r"lacks.*model.layers.1.mlp.up_proj.weight"):
        RolloutEngine.from_pretrained(tmp_path)
