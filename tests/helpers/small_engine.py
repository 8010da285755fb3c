"""Small engines, models and a tokenizer of bytes, and a request among many, for the tests of ``generate_batch``."""

import os
import subprocess
import sys
from functools import cache

import torch
from families import draw, make_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from stoker.rollout import Completion, EngineConfig, RolloutBatch, RolloutEngine, SamplingParams

EOS = 256
TEXT_VOCAB = 264


@cache
def llama() -> PreTrainedModel:
    return make_model("llama")


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, "<eos>" is 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    fast.add_special_tokens({"additional_special_tokens": ["<user>", "<bot>"]})
    fast.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
    )
    assert fast.eos_token_id == EOS
    return fast


def encode(text: str) -> list[int]:
    return tokenizer()(text)["input_ids"]


@torch.no_grad()
def successor_model(cycle: list[int], vocab: int = TEXT_VOCAB) -> PreTrainedModel:
    """Says the token that follows the last one in ``cycle``, with near certainty at temperature 1."""
    model = make_model(
        "llama", vocab_size=vocab, hidden_size=vocab, num_hidden_layers=1, attention_bias=False, mlp_bias=False
    )
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.model.norm.weight.fill_(1.0)
    model.model.embed_tokens.weight.copy_(torch.eye(vocab))
    model.lm_head.weight.zero_()
    assert len(set(cycle)) == len(cycle)
    for now, following in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        model.lm_head.weight[following, now] = 2.0
    return model


def build(model: PreTrainedModel | None = None, **config) -> RolloutEngine:
    fields = {"kv_cache_memory": "4MiB", "max_num_seqs": 64} | config
    with_text = fields.pop("tokenizer", None)
    return RolloutEngine(model or llama(), config=EngineConfig(**fields), tokenizer=with_text)


def only(batch: RolloutBatch) -> Completion:
    batch.raise_for_errors()
    ((completion,),) = [o.completions for o in batch]
    return completion


def tokens(batch: RolloutBatch) -> list[list[list[int]]]:
    batch.raise_for_errors()
    return [[c.token_ids for c in o.completions] for o in batch]


GREEDY = SamplingParams(temperature=0, max_tokens=8)

CROWD = [draw(100 + i, 1 + 5 * i % 37) for i in range(63)]
CROWD_PARAMS = [
    SamplingParams(
        max_tokens=4 + i % 21,
        temperature=(0.0, 0.7, 1.0, 1.5)[i % 4],
        top_k=(0, 5)[i % 2],
        top_p=(1.0, 0.9, 1.0)[i % 3],
        repetition_penalty=(1.0, 1.0, 1.2)[i % 3],
        min_tokens=i % 3,
        stop_token_ids=(i, 2 * i),
        seed=i,
        logprobs=i % 3,
    )
    for i in range(63)
]
NEEDLE = draw(7, 21)
NEEDLE_PARAMS = SamplingParams(n=2, max_tokens=24, seed=1234, logprobs=2)


@cache
def needle_alone() -> RolloutBatch:
    with build() as engine:
        return engine.generate_batch([NEEDLE], NEEDLE_PARAMS)


def in_another_process(code: str, *arguments: str, **environment: str) -> str:
    """What the code prints. It finds the tests' modules."""
    path = os.pathsep.join([os.path.dirname(os.path.abspath(__file__)), *sys.path])
    env, command = os.environ | {"PYTHONPATH": path} | environment, [sys.executable, "-P", "-c", code, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
