"""GPUs other than an H200, the only one the kernels have run on: which can run them, and that launches fit there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compiling import compiled
from emulated_cuda import emulated_cuda
from families import make_model

from stoker.kernels.attention.config import HeadShape, LaunchConfig, launch_config
from stoker.kernels.errors import InvalidConfigError
from stoker.kernels.ops import check_gpu
from stoker.rollout import RolloutEngine


def test_compiled_for_other_gpus_the_kernels_fit_them(tmp_path: Path) -> None:
    made = compiled("compile_elsewhere", tmp_path)
    of_each = {
        "decode_kernel",
        "prefill_kernel",
        "_streamed_kernel",
        "_skinny_kernel",
        "_grouped_kernel",
        "shrink_kernel",
    }
    assert {m["kernel"] for m in made} == of_each and len({m["architecture"] for m in made}) == 5
    for m in made:
        resident = m["programs"] // m["processors"] if m["kernel"] == "decode_kernel" else 1
        assert m["stack"] <= 8 and resident * (m["shared"] + 1024) <= m["room"], m
        # Hopper brought programs that come up early and tiles that the chip copies; before, threads copy 16 bytes at a time.
        is_late = m["architecture"] < 90
        waits = m["waits"] or (m["kernel"] == "decode_kernel" and m["before"] == ["ld.global"])  # for what it fetches
        assert waits == m["dependent"] == (not is_late), m
        assert bool(m["tiles_copied"]) == (m["kernel"] == "_streamed_kernel" and not is_late), m
        assert m["wide_loads"] >= 12 or m["tiles_copied"], m
        # Of fp32 there are none, and on Blackwell's largest they have other names.
        assert m["tensor_cores"] or m["kernel"] == "_skinny_kernel" or m["architecture"] == 100, m


# Bytes of shared memory of a multiprocessor: of an L4, an A100 and an H200, on which the last ones were measured.
SMALL, MIDDLE, LARGE = (kib * 1024 for kib in (100, 164, 228))


@pytest.mark.parametrize(
    ("dims", "queries", "shared", "expected"),
    [
        ((64, 64, 2, 2), 4, SMALL, LaunchConfig(16, 64, 2, 5, 20, 255, True)),
        ((64, 64, 2, 2), 4, LARGE, LaunchConfig(16, 64, 2, 5, 40, 255, True)),
        ((64, 64, 2, 2), 64, LARGE, LaunchConfig(64, 64, 4, 5, 30, 168, True)),
        ((128, 128, 2, 2), 4, MIDDLE, LaunchConfig(16, 32, 2, 5, 30, 255, True)),
        ((128, 128, 2, 2), 4, LARGE, LaunchConfig(16, 32, 2, 5, 40, 255, True)),
        ((128, 128, 2, 1), 4, LARGE, LaunchConfig(16, 64, 4, 5, 20, 255, True)),
        ((128, 128, 2, 2), 64, LARGE, LaunchConfig(64, 64, 8, 5, 10, 255, True)),
        ((128, 128, 4, 4), 4, LARGE, LaunchConfig(16, 32, 4, 5, 20, 255, True)),
        ((256, 256, 2, 2), 2, SMALL, LaunchConfig(16, 32, 4, 5, 10, 255, True)),
        ((256, 256, 2, 2), 2, LARGE, LaunchConfig(16, 32, 4, 5, 20, 255, True)),
        ((512, 512, 2, 2), 8, SMALL, LaunchConfig(16, 16, 8, 3, 10, 255, True)),
        ((512, 512, 2, 2), 8, MIDDLE, LaunchConfig(16, 16, 8, 5, 10, 255, True)),
        ((512, 512, 2, 2), 8, LARGE, LaunchConfig(16, 32, 8, 5, 10, 255, True)),
        ((512, 512, 4, 4), 8, SMALL, LaunchConfig(16, 16, 8, 3, 10, 255, False)),
    ],
)
def test_decode_steps_attention(
    dims: tuple[int, int, int, int], queries: int, shared: int, expected: LaunchConfig
) -> None:
    assert launch_config(queries, HeadShape(*dims), 10, shared) == expected


@pytest.mark.parametrize(
    ("dims", "shared", "expected"),
    [
        ((128, 128, 2, 2), SMALL, (128, 64, 8, 5)),
        ((256, 256, 2, 2), SMALL, (64, 16, 8, 5)),
        ((256, 256, 2, 2), LARGE, (64, 32, 8, 5)),
        ((512, 512, 2, 2), LARGE, (32, 32, 8, 5)),
        ((128, 128, 4, 4), LARGE, (16, 32, 4, 5)),
    ],
)
def test_prompts_attention(dims: tuple[int, int, int, int], shared: int, expected: tuple[int, int, int, int]) -> None:
    c = launch_config(0, HeadShape(*dims), 10, shared, prefill=True)
    assert (c.block_m, c.block_n, c.num_warps, c.num_stages) == expected


def test_a_gpu_that_is_too_old_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated_cuda() as device:
        model = device.adopt(make_model("llama"))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
        with pytest.raises(InvalidConfigError, match=r"compute capability 8\.0 .*cuda:0 is Tesla T4: use another GPU"):
            RolloutEngine(model)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        check_gpu(torch.device("cuda", 0))
        monkeypatch.setattr(torch.version, "hip", "7.0")
        with pytest.raises(InvalidConfigError, match="GPUs of NVIDIA, and cuda:0 is"):
            check_gpu(torch.device("cuda", 0))
    check_gpu(torch.device("cpu"))
