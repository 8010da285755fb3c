"""What ``rollout`` compares engines on."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.benchmarks.workloads import HYBRID_2B, LLAMA_1B, QWEN_7B, SMALL, TOY, TOY_HYBRID, ModelSpec, Workload


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A comparison: ``repeats`` timed rounds of all engines in turn.

    After the first round, an engine whose turn would end more than ``budget_s`` seconds after the start sits out.
    """

    spec: ModelSpec
    workload: Workload
    repeats: int
    extras: bool = True  # also lengths dealt to other requests, and whole cycles
    budget_s: float = float("inf")
    peer_limit_s: float = float("inf")  # a peer whose warm-up takes longer is not timed
    warm_up_tokens: int | None = None  # of a completion, at most; None: warm-ups are as long as what is timed

    @property
    def warm_up_lengths(self) -> list[int]:
        most = self.warm_up_tokens or self.workload.cap
        return [min(n, most) for n in self.workload.lengths]


# GRPO groups: (i) median 0.4 of the cap, all in flight at once; (ii) median 0.17 of it, more requests than slots. The last one
# of a CPU has lengths of a real training, where attention costs every engine its share.
_CPU_I = Workload(name="i", prompts=8, samples=8, prompt_tokens=(64, 256), median=100, sigma=0.7, cap=256, slots=64)
_CPU_II = Workload(name="ii", prompts=24, samples=8, prompt_tokens=(64, 256), median=44, sigma=1.0, cap=256, slots=64)
_CPU_FULL = Workload(
    name="i, full length", prompts=8, samples=8, prompt_tokens=(256, 1024), median=400, sigma=0.7, cap=1024, slots=64
)
_GPU_I = Workload(name="i", prompts=16, samples=8, prompt_tokens=(256, 1024), median=200, sigma=0.7, cap=512, slots=128)
_GPU_II = Workload(
    name="ii", prompts=32, samples=8, prompt_tokens=(256, 1024), median=700, sigma=0.9, cap=4096, slots=256
)
_QUICK = Workload(name="quick", prompts=8, samples=8, prompt_tokens=(16, 64), median=26, sigma=0.7, cap=64, slots=64)

SCENARIOS = {
    ("cpu", False): (
        Scenario(spec=TOY, workload=_CPU_I, repeats=5),
        Scenario(spec=TOY, workload=_CPU_II, repeats=3),
        Scenario(spec=TOY, workload=_CPU_FULL, repeats=3, extras=False, budget_s=300, warm_up_tokens=32),
        Scenario(spec=SMALL, workload=_CPU_I, repeats=3),
        Scenario(spec=SMALL, workload=_CPU_FULL, repeats=3, extras=False, budget_s=1500, warm_up_tokens=32),
        Scenario(spec=TOY_HYBRID, workload=_CPU_I, repeats=3),
    ),
    ("cpu", True): (
        Scenario(spec=TOY, workload=_QUICK, repeats=3),
        Scenario(spec=TOY_HYBRID, workload=_QUICK, repeats=1),
        Scenario(spec=SMALL, workload=_QUICK, repeats=1),
    ),
    ("cuda", False): (
        Scenario(spec=LLAMA_1B, workload=_GPU_I, repeats=5, budget_s=30, peer_limit_s=25),
        Scenario(spec=LLAMA_1B, workload=_GPU_II, repeats=5, extras=False, budget_s=25, peer_limit_s=20),
        Scenario(spec=QWEN_7B, workload=_GPU_I, repeats=5, extras=False, budget_s=30, peer_limit_s=20),
        Scenario(spec=HYBRID_2B, workload=_GPU_I, repeats=5, extras=False, budget_s=20, peer_limit_s=20),
    ),
    ("cuda", True): (Scenario(spec=LLAMA_1B, workload=_QUICK, repeats=3, budget_s=30, peer_limit_s=30),),
}
