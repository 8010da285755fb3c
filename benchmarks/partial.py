"""Partial rollouts against waiting for the longest: ``python -m stoker.benchmarks.partial``.

Rounds of a training: sample, update the weights, sample again, while completions have a long tail. One way waits for all
of a round's requests. The other submits, waits for a share of those under way, keeps the others with their KV over the
update (``pause("keep")``, ``resume``), and fills the slots with new prompts. Both serve the same requests in the same
order, and neither is told how long any of them will be. Writes one JSON file, prints a table and, last, one line of JSON.
On a CPU only ratios of one run mean anything: run it on a machine that does nothing else.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from stoker.benchmarks import ceilings, command
from stoker.benchmarks.gate import GateError
from stoker.benchmarks.workloads import LLAMA_1B, TOY, ModelSpec, Workload, dtype_of, train
from stoker.rollout import Completion, EngineConfig, RolloutEngine, RolloutHandle, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Scenario:
    spec: ModelSpec
    workload: Workload  # of all rounds; one sample a prompt
    share: float  # of the requests under way, after which a partial round ends
    repeats: int


def _workload(rounds: int, slots: int, **shape: Any) -> Workload:
    return Workload(name="tail", prompts=rounds * slots, samples=1, sigma=1.2, slots=slots, **shape)


SCENARIOS = {
    ("cpu", False): (
        Scenario(
            spec=TOY, workload=_workload(16, 16, prompt_tokens=(16, 64), median=40, cap=512), share=0.5, repeats=5
        ),
    ),
    ("cpu", True): (
        Scenario(spec=TOY, workload=_workload(3, 4, prompt_tokens=(4, 8), median=6, cap=32), share=0.75, repeats=1),
    ),
    ("cuda", False): (
        Scenario(
            spec=LLAMA_1B,
            workload=_workload(6, 128, prompt_tokens=(64, 256), median=300, cap=4096),
            share=0.75,
            repeats=5,
        ),
    ),
    ("cuda", True): (
        Scenario(
            spec=LLAMA_1B, workload=_workload(3, 16, prompt_tokens=(16, 32), median=30, cap=256), share=0.75, repeats=2
        ),
    ),
}


@dataclass(frozen=True)
class Found:
    seconds: float
    tokens: int  # of finished completions
    rounds: int
    carried: int  # completions that more than one version of the weights has sampled


class Rounds:
    """The two ways over one engine and one list of requests."""

    def __init__(self, engine: RolloutEngine, model: PreTrainedModel, scenario: Scenario, device: str) -> None:
        self.engine, self.model, self.scenario, self.device = engine, model, scenario, device
        self.lengths = scenario.workload.lengths

    def run(self, share: float, repeat: int) -> Found:
        """All requests, in rounds that end when ``share`` of those under way is done."""
        slots = self.scenario.workload.slots
        prompts = self.scenario.workload.draw(self.scenario.spec.config.vocab_size, repeat)
        under_way: dict[RolloutHandle, tuple[int, int]] = {}  # request, and the version it was submitted under
        done: list[tuple[int, int, Completion]] = []
        submitted = rounds = 0
        ceilings.synchronize(self.device)
        start = time.perf_counter()
        while submitted < len(prompts) or under_way:
            new = range(submitted, min(len(prompts), submitted + slots - len(under_way)))
            for row in new:
                params = SamplingParams(max_tokens=self.lengths[row], ignore_eos=True)
                under_way[self.engine.submit(prompts[row], params)] = (row, self.engine.weight_version)
            submitted += len(new)
            last = submitted == len(prompts)  # no prompt is left that a slot could be filled with
            finished, _ = self.engine.wait(list(under_way), share=1.0 if last else share)
            for handle in finished:
                (completion,) = handle.result().completions
                done.append((*under_way.pop(handle), completion))
            self.engine.pause("keep")
            train(self.model)
            self.engine.update_weights()
            self.engine.resume()
            rounds += 1
        ceilings.synchronize(self.device)
        seconds = time.perf_counter() - start
        carried = self.check(done, whole=share == 1.0)
        return Found(seconds, sum(len(completion.token_ids) for *_, completion in done), rounds, carried)

    def check(self, done: list[tuple[int, int, Completion]], whole: bool) -> int:
        """That each completion has its own length, and its versions rise one by one from that of its submission.

        Returns how many have a seam. With ``whole`` rounds none may have one, otherwise some must.
        """
        carried = 0
        if sorted(row for row, *_ in done) != list(range(len(self.lengths))):
            raise GateError("a request was lost or finished twice")
        for row, version, completion in done:
            if len(completion.token_ids) != self.lengths[row] or completion.finish_reason != "length":
                raise GateError(f"request {row} ended after {len(completion.token_ids)} of {self.lengths[row]} tokens")
            seen = list(dict.fromkeys(completion.weight_versions))
            if seen != list(range(version, version + len(seen))) or completion.weight_versions != sorted(
                completion.weight_versions
            ):
                raise GateError(f"request {row}, submitted under version {version}, has tokens of versions {seen}")
            carried += len(seen) > 1
        if (carried == 0) != whole:
            raise GateError(
                f"{carried} completions went on over an update, with rounds that {'' if whole else 'do not '}wait"
            )
        return carried


def compare(scenario: Scenario, device: str) -> dict[str, Any]:
    work = scenario.workload
    dtype = dtype_of(device)
    model = scenario.spec.build(device, dtype)
    ways = {"wait for all": 1.0, "partial": scenario.share}
    found: dict[str, list[Found]] = {name: [] for name in ways}
    with RolloutEngine(model, config=EngineConfig(max_num_seqs=work.slots, max_model_len=work.max_len)) as engine:
        rounds = Rounds(engine, model, scenario, device)
        for repeat in range(-1, scenario.repeats):  # the first is for what is made or captured once
            for name, share in ways.items():
                one = rounds.run(share, repeat)
                if repeat >= 0:
                    found[name].append(one)
    speed = {name: statistics.median(f.tokens / f.seconds for f in runs) for name, runs in found.items()}
    return {
        "model": {"name": scenario.spec.name, "dtype": str(dtype).removeprefix("torch.")},
        "workload": work.describe(),
        "share": scenario.share,
        "ways": {
            name: {
                "seconds": [f.seconds for f in runs],
                "median_s": statistics.median(f.seconds for f in runs),
                "finished_tokens_per_s": speed[name],
                "times_waiting": speed[name] / speed["wait for all"],
                "rounds": runs[0].rounds,
                "over_an_update": runs[0].carried,
            }
            for name, runs in found.items()
        },
    }


def table(run: dict[str, Any]) -> list[str]:
    work = run["workload"]
    lines = [
        f"{run['model']['name']} ({run['model']['dtype']}): {work['prompts']} requests on {work['slots']} slots, "
        f"{work['completion_tokens']} completion tokens, median {work['median_length']:.0f}, longest {work['longest']}; a "
        f"partial round ends with {run['share']:.0%}",
        f"  {'rounds':14}{'wall s':>9}{'finished tok/s':>16}{'ratio':>8}{'updates':>9}{'over an update':>16}",
    ]
    for name, way in run["ways"].items():
        lines.append(
            f"  {name:14}{way['median_s']:9.3f}{way['finished_tokens_per_s']:16.0f}{way['times_waiting']:7.2f}x"
            f"{way['rounds']:9}{way['over_an_update']:16}"
        )
    return lines


def headline(run: dict[str, Any]) -> dict[str, float]:
    return {"x_waiting": round(run["ways"]["partial"]["times_waiting"], 2)}


def main() -> int:
    return command.run("partial", __doc__, SCENARIOS, compare, table, headline, quick="a small workload")


if __name__ == "__main__":
    sys.exit(main())
