"""PEFT models with adapters that change something, and PEFT's own forward, which the engine has to reproduce."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import oracle
import torch
from families import make_model
from transformers import PreTrainedModel

from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

if TYPE_CHECKING:  # else where it is used: a GPU host may lack PEFT, and files have tests that need none
    from peft import LoraConfig, PeftModel

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7], [5] * 11, [3, 1]]
CONFIG = EngineConfig(max_num_seqs=8, max_model_len=64, block_size=4, kv_cache_memory="8MiB")
GREEDY = SamplingParams(temperature=0, max_tokens=9)
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
# Of gpt_oss and others, whose experts are parameters of one module.
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
BIASES = ["mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"]


@torch.no_grad()
def shake(model: torch.nn.Module, seed: int = 1) -> None:
    """New numbers for every adapter: those it starts with change nothing."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_magnitude" in name:
            parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
        elif "lora_" in name:
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        elif "trainable_tokens" in name:
            parameter.add_(torch.randn(parameter.shape, generator=generator))
        elif name.endswith(".bias") and parameter.requires_grad:
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
        elif "modules_to_save" in name:
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


def lora(**options: Any) -> LoraConfig:
    from peft import LoraConfig

    return LoraConfig(**{"r": 4, "target_modules": TARGETS} | options)


def with_lora(model: PreTrainedModel, seed: int = 1, **options: Any) -> PeftModel:
    from peft import get_peft_model

    adapted = get_peft_model(model, lora(**options)).eval()
    shake(adapted, seed)
    return adapted


def peft_model(family: str = "llama", seed: int = 1, **options: Any) -> PeftModel:
    return with_lora(make_model(family), seed, **options)


def two_adapters() -> PeftModel:
    model = peft_model()
    # What is added is as large as the weights. On queries and keys of more, rounding decides where attention looks.
    other = lora(r=7, lora_alpha=2, target_modules=["k_proj", "up_proj", "q_proj"], use_rslora=True)
    model.add_adapter("other", other)
    shake(model, seed=2)
    return model


@contextmanager
def running(model: PeftModel, adapter: str | None) -> Iterator[None]:
    """The model with that adapter, or with none; as it was afterwards."""
    before = model.active_adapter
    try:
        if adapter is not None:
            model.set_adapter(adapter)
        with model.disable_adapter() if adapter is None else nullcontext():
            yield
    finally:
        model.set_adapter(before)


def assert_like_peft(
    engine: RolloutEngine,
    model: PeftModel,
    adapters: list[Any],
    prompts: Any = PROMPTS,
    others: Mapping[str, PeftModel] | None = None,
) -> None:
    """Tokens, and log-probabilities while sampling and while scoring.

    adapters: of each prompt, none of them LIVE. others: by the names of adapters that are not the model's, whose they are.
    """
    batch = engine.generate_batch(prompts, GREEDY, adapter=adapters)
    sequences = [o.prompt_token_ids + o.completions[0].token_ids for o in batch]
    scores = engine.score(sequences, start=[len(p) for p in prompts], adapter=adapters)
    for prompt, adapter, output, score in zip(prompts, adapters, batch, scores, strict=True):
        (completion,) = output.completions
        owner = (others or {}).get(adapter)
        with running(owner or model, "default" if owner else adapter):
            ids = completion.token_ids
            expected = oracle.greedy_logprobs(owner or model, prompt, ids, GREEDY.max_tokens).float()
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(score.logprobs, expected, atol=1e-4, rtol=0)


def assert_kernels_find(engine: RolloutEngine, slot: int, matrices: Iterable[torch.Tensor]) -> None:
    """That the slot has the addresses of these A and B, and no others. Of an adapter without experts."""
    tables = {t for group, _ in engine._binding.shell.lora._adapted.values() for t in group.tables}
    found = {address for table in tables for address in table.pointers[:, slot, :2].flatten().tolist()}
    assert found - {0} == {matrix.data_ptr() for matrix in matrices}


_found: list[list[int]] = [[] for _ in PROMPTS]  # by ``tokens``: what a model is likely to give


def tokens(engine: RolloutEngine, **options: Any) -> list[list[int]]:
    _found[:] = [o.completions[0].token_ids for o in engine.generate_batch(PROMPTS, GREEDY, **options)]
    return [*_found]


def greedy_tokens(model: Any) -> list[list[int]]:
    """Of the model as it is. As quick to tell as a forward where it is what ``tokens`` gave last."""
    return oracle.greedy_each(model, PROMPTS, GREEDY.max_tokens, _found)


def expected_tokens(model: PeftModel, adapter: str | None = "default") -> list[list[int]]:
    with running(model, adapter):
        return greedy_tokens(model)


def state_dict(model: PeftModel) -> dict[str, torch.Tensor]:
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model)
