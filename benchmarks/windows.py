"""What layers with a sliding window leave to others: ``python -m stoker.benchmarks.windows``.

Two models of the same sizes get the same KV memory and the same requests. In one, five layers of six see a window of the last
tokens, as in Gemma 3; in the other all layers see everything. Counted are the sequences that run at a time, and requests put
back for want of blocks; timed are whole rollouts, in turns. The first model also attends to less, so the times are not of
memory alone. Writes one JSON file, prints a table and, last, one line of JSON. On a CPU only ratios of one run mean anything.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from stoker.benchmarks import ceilings, command
from stoker.benchmarks.gate import GateError
from stoker.benchmarks.workloads import ModelSpec, Workload, dtype_of
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

_PERIOD = 6  # of so many layers, the last sees all keys


@dataclass(frozen=True, kw_only=True)
class Scenario:
    spec: ModelSpec  # with windows
    workload: Workload
    room: int  # sequences of the greatest length that the memory holds where every layer keeps all keys
    repeats: int


def _model(name: str, window: int, **sizes: int) -> ModelSpec:
    common = {"max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": None}
    layers = range(sizes["num_hidden_layers"])
    types = ["sliding_attention" if (layer + 1) % _PERIOD else "full_attention" for layer in layers]
    windows = {"use_sliding_window": True, "sliding_window": window, "layer_types": types}
    return ModelSpec(name=name, model_class=Qwen3ForCausalLM, config=Qwen3Config(**common, **windows, **sizes))


def _workload(requests: int, prompts: tuple[int, int], median: int, cap: int) -> Workload:
    shape = {"prompts": requests, "samples": 1, "slots": requests}
    return Workload(name="long", prompt_tokens=prompts, median=median, sigma=0.3, cap=cap, **shape)


_TOY = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6}
_TOY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_1B = {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 24}
_1B |= {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 128}
SCENARIOS = {
    ("cpu", False): [
        Scenario(
            spec=_model("windows-toy", 64, **_TOY), workload=_workload(64, (256, 512), 400, 512), room=12, repeats=3
        )
    ],
    ("cpu", True): [
        Scenario(spec=_model("windows-toy", 16, **_TOY), workload=_workload(8, (32, 48), 40, 64), room=2, repeats=1)
    ],
    ("cuda", False): [
        Scenario(
            spec=_model("windows-1b", 1024, **_1B),
            workload=_workload(128, (512, 4096), 6000, 12288),
            room=16,
            repeats=2,
        )
    ],
    ("cuda", True): [
        Scenario(
            spec=_model("windows-1b", 128, **_1B), workload=_workload(32, (512, 1024), 400, 512), room=8, repeats=1
        )
    ],
}


@dataclass
class Way:
    """One of the two models in its engine, and what was found."""

    engine: RolloutEngine
    seconds: list[float] = field(default_factory=list)
    at_a_time: list[float] = field(default_factory=list)  # the mean over steps
    preemptions: list[int] = field(default_factory=list)

    def run(self, prompts: list[list[int]], lengths: list[int], device: str) -> None:
        running = []
        before = self.engine.stats().num_preemptions

        def rollout() -> None:
            params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
            handles = [self.engine.submit(p, one) for p, one in zip(prompts, params, strict=True)]
            left = handles
            while left:
                _, left = self.engine.wait(left, timeout=0)
                running.append(sum(handle.status == "running" for handle in left))
            if [len(handle.result().completions[0].token_ids) for handle in handles] != lengths:
                raise GateError("a completion is not as long as was asked")

        self.seconds.append(ceilings.timed(rollout, device))
        self.at_a_time.append(statistics.mean(running))
        self.preemptions.append(self.engine.stats().num_preemptions - before)


def compare(scenario: Scenario, device: str) -> dict[str, Any]:
    work, spec = scenario.workload, scenario.spec
    windowed = spec.build(device, dtype_of(device))
    count = windowed.config.num_hidden_layers
    plain_config = Qwen3Config(
        **spec.config.to_dict() | {"use_sliding_window": False, "layer_types": ["full_attention"] * count}
    )
    whole = ModelSpec(name=spec.name, model_class=Qwen3ForCausalLM, config=plain_config).build(device, dtype_of(device))
    whole.load_state_dict(windowed.state_dict())
    settings: dict[str, Any] = {
        "max_num_seqs": work.slots,
        "max_model_len": work.max_len,
        "max_num_batched_tokens": 2048,
    }
    with RolloutEngine(whole, config=EngineConfig(kv_cache_memory="64MiB", **settings)) as probe:
        blocks = scenario.room * -(-work.max_len // probe.config.block_size) + 1
        memory = blocks * probe.stats().kv_block_bytes

    def engine_of(model: PreTrainedModel) -> RolloutEngine:
        return RolloutEngine(
            model, config=EngineConfig(kv_cache_memory=memory, enable_prefix_caching=False, **settings)
        )

    with engine_of(windowed) as one, engine_of(whole) as other:
        ways = {"windows": Way(one), "all keys": Way(other)}
        for repeat in range(-1, scenario.repeats):  # the first is for what is made or captured once
            prompts = work.draw(spec.config.vocab_size, repeat)
            for way in ways.values():
                way.run(prompts, work.lengths, device)
    tokens = sum(work.lengths)
    return {
        "model": {"name": spec.name, "dtype": str(windowed.dtype).removeprefix("torch."), "layers": count},
        "window": spec.config.sliding_window,
        "workload": work.describe(),
        "kv_cache_bytes": memory,
        "ways": {
            name: {
                "seconds": way.seconds[1:],
                "tokens_per_s": tokens / statistics.median(way.seconds[1:]),
                "at_a_time": statistics.median(way.at_a_time[1:]),
                "preemptions": way.preemptions[1:],
            }
            for name, way in ways.items()
        },
    }


def table(run: dict[str, Any]) -> list[str]:
    work = run["workload"]
    lines = [
        f"{run['model']['name']} ({run['model']['dtype']}, {run['model']['layers']} layers, five of six with a window of "
        f"{run['window']}): {work['prompts']} requests, {work['completion_tokens']} completion tokens, KV cache of "
        f"{run['kv_cache_bytes'] / 1e6:.0f} MB",
        f"  {'':10}{'sequences at a time':>21}{'put back':>10}{'tok/s':>9}",
    ]
    for name, way in run["ways"].items():
        lines.append(
            f"  {name:10}{way['at_a_time']:21.1f}{statistics.median(way['preemptions']):10.0f}{way['tokens_per_s']:9.0f}"
        )
    return lines


def headline(run: dict[str, Any]) -> dict[str, float]:
    windows, whole = run["ways"]["windows"], run["ways"]["all keys"]
    return {f"x_{what}": round(windows[what] / whole[what], 2) for what in ("at_a_time", "tokens_per_s")}


def main() -> int:
    return command.run("windows", __doc__, SCENARIOS, compare, table, headline)


if __name__ == "__main__":
    sys.exit(main())
