import dataclasses
import math

import numpy as np
import pytest
import torch
from small_engine import build

from stoker.kernels.errors import InvalidConfigError, StokerError
from stoker.rollout.config import EngineConfig, parse_bytes


def test_defaults_are_valid_and_frozen():
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_num_seqs = 1


@pytest.mark.parametrize(
    "name", ["max_num_seqs", "max_num_batched_tokens", "block_size", "decode_window", "score_chunk_tokens"]
)
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "8", None])
def test_counts_are_positive_integers(name, value):
    with pytest.raises(InvalidConfigError, match=rf"^{name}={value!r}: it has to be a positive integer"):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("number", [np.int64(7), np.array(7), torch.tensor(7)])
def test_integers_of_numpy_and_torch_are_integers(number):
    names = ("max_num_seqs", "max_model_len", "max_lora_rank", "seed", "kv_cache_memory", "gather_memory")
    config = EngineConfig(**dict.fromkeys(names, number))
    assert [(type(v), v) for v in (getattr(config, name) for name in names)] == [(int, 7)] * len(names)


@pytest.mark.parametrize("name", ["enable_prefix_caching", "use_graphs", "deterministic", "check_finite_weights"])
@pytest.mark.parametrize("value", ["False", 0, None])
def test_switches_are_on_or_off(name, value):
    with pytest.raises(InvalidConfigError, match=rf"^{name}={value!r}: give True or False(, or 'auto')?$"):
        EngineConfig(**{name: value})


def test_graphs_that_are_asked_for_where_there_can_be_none():
    with pytest.raises(
        InvalidConfigError, match="use_graphs=True: CUDA graphs need a CUDA device, and the model is on cpu"
    ):
        build(use_graphs=True)
    for choice in ("auto", False):
        build(use_graphs=choice).close()


@pytest.mark.parametrize("value", [0, 2.5, "4096"])
def test_max_model_len_is_none_or_a_positive_integer(value):
    assert EngineConfig(max_model_len=None).max_model_len is None
    with pytest.raises(InvalidConfigError, match=r"^max_model_len="):
        EngineConfig(max_model_len=value)


@pytest.mark.parametrize("value", [1.5, None, True, "0"])
def test_seed_is_an_integer(value):
    with pytest.raises(InvalidConfigError, match=r"^seed="):
        EngineConfig(seed=value)


def test_dtype_by_name_or_value():
    assert EngineConfig().dtype == "auto"
    assert EngineConfig(dtype="bfloat16").dtype is torch.bfloat16
    assert EngineConfig(dtype=torch.float16).dtype is torch.float16


@pytest.mark.parametrize(
    "value", ["bf16", "Tensor", "int8", torch.int64, 16, None, "float8_e4m3fn", torch.float8_e5m2, [1]]
)
def test_a_dtype_that_is_none_is_refused(value):
    with pytest.raises(InvalidConfigError, match=r"no floating-point torch dtype"):
        EngineConfig(dtype=value)


def test_device():
    assert EngineConfig(device="cuda:1").device == torch.device("cuda", 1)
    assert EngineConfig(device=torch.device("cpu")).device == torch.device("cpu")
    for value in ("gpu", "cpu:x", None):
        with pytest.raises(InvalidConfigError, match=r"^device="):
            EngineConfig(device=value)


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        (1, 1),
        (4096, 4096),
        ("4096", 4096),
        ("12B", 12),
        ("4GiB", 4 * 2**30),
        ("512 MB", 512 * 10**6),
        (" 1.5 gib ", 3 * 2**29),
        ("2G", 2 * 10**9),
        ("2Gi", 2 * 2**30),
        ("3KiB", 3 * 2**10),
        ("1kb", 1000),
        ("7mib", 7 * 2**20),
    ],
)
def test_amounts_of_bytes(text, amount):
    assert parse_bytes(text, "") == amount
    config = EngineConfig(kv_cache_memory=text, gather_memory=text)
    assert config.kv_cache_memory == config.gather_memory == amount


@pytest.mark.parametrize(
    "value", [0, -1, 1.5, True, None, "", "0", "0.2B", "4 TiB", "-4GiB", "4iB", "GiB", "many", "1e9", math.nan]
)
def test_a_bad_amount_is_refused(value):
    with pytest.raises(InvalidConfigError, match=r"kv_cache_memory=.*'4GiB', or 'auto'") as error:
        EngineConfig(kv_cache_memory=value)
    assert isinstance(error.value, StokerError) and isinstance(error.value, ValueError)
    with pytest.raises(InvalidConfigError, match=r"gather_memory=.*'4GiB'$"):
        EngineConfig(gather_memory=value)


def test_auto_memory_stays_auto():
    assert EngineConfig(kv_cache_memory="auto").kv_cache_memory == "auto"
