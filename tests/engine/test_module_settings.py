"""What modules compute with besides tensors: which attributes are watched, and that changes are noticed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stoker.engine.module_settings import Settings
from stoker.kernels.errors import UnsupportedModelError


def test_a_setting_is_what_it_was_until_it_is_another() -> None:
    """A NaN is not even itself; what a forward keeps where there was nothing is no setting."""
    owner: dict[str, Any] = {"scale": float("nan"), "positions": None, "top_k": 2}
    settings = Settings()
    for name in owner:
        settings.watch(owner, name)
    assert not settings.changed
    owner["positions"] = torch.zeros(3)
    assert not settings.changed
    for other in (3, None, torch.zeros(2)):
        owner["top_k"] = other
        assert settings.changed
    owner["top_k"] = 2
    assert not settings.changed


@pytest.mark.parametrize(
    ("found", "own", "taken", "watched"),
    [
        (0.5, 1.0, 0.5, True),
        ("gelu", "silu", "gelu", True),
        (None, 4, None, True),
        (7, None, 7, True),
        (np.float32(0.5), 1.0, 0.5, True),
        (torch.tensor(3), 2, 3, True),
        (torch.tensor(3), None, None, False),  # what a forward keeps
        ([1, 2], [3], [3], False),
    ],
)
def test_what_is_taken_over(found: Any, own: Any, taken: Any, watched: bool) -> None:
    settings, owner = Settings(), {"scale": found}
    value = settings.taken_over("mlp", owner, "scale", own)
    assert type(value) is type(taken) and value == taken
    owner["scale"] = 9
    assert settings.changed == watched


@pytest.mark.parametrize("array", [np.ones(3), torch.ones(3, 1)])
def test_an_array_in_place_of_a_number_is_refused(array: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"^mlp\.scale is an array of shape \(3,"):
        Settings().taken_over("mlp", {"scale": array}, "scale", 1.0)


def test_what_the_model_has_not_is_the_config_s() -> None:
    settings, owner = Settings(), dict[str, Any]()
    assert settings.taken_over("mlp", owner, "scale", 2.0) == 2.0
    owner["scale"] = 3.0
    assert not settings.changed


@pytest.mark.parametrize(
    "name",
    [
        "_attn_implementation", "p", "name_or_path", "padding_idx", "attention_dropout", "resid_pdrop", "layerdrop",
        "router_jitter_noise", "output_router_loss", "router_z_coef", "gradient_checkpointing", "initializer_range",
        "max_seq_len_cached", "pad_token_id",
    ],
)  # fmt: skip
def test_names_of_what_no_rollout_reads(name: str) -> None:
    owner = {name: 1, "scale": 1}
    settings = Settings()
    for one in owner:
        settings.watch(owner, one)
    owner[name] = 2
    assert not settings.changed
    owner["scale"] = 2
    assert settings.changed


@pytest.mark.parametrize("name", ["top_k", "pp", "drip", "scaling", "model_path", "max_position_embeddings"])
def test_names_of_what_rollouts_may_read(name: str) -> None:
    settings, owner = Settings(), {name: 1}
    settings.watch(owner, name)
    owner[name] = 2
    assert settings.changed


@pytest.mark.parametrize(
    ("name", "other", "changed"),
    [
        ("softcap", 30.0, True),
        ("softcap", 30, True),
        ("softcap", True, False),
        ("window", 5, True),
        ("window", None, True),
        ("scale", 0.25, True),
        ("use_cache", False, False),
        ("kind", "b", False),
        ("sizes", [3], False),
    ],
)
def test_numbers_of_a_configuration_are_watched_and_its_switches_are_not(name: str, other: Any, changed: bool) -> None:
    config = SimpleNamespace(softcap=None, window=4, scale=0.5, use_cache=True, kind="a", sizes=[1, 2])
    settings = Settings()
    settings.watch_numbers(config)
    assert not settings.changed
    setattr(config, name, other)
    assert settings.changed == changed
