"""A small engine and its model, and what shows that an engine is as usable as before something was refused."""

import oracle
from transformers import PreTrainedModel

from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

PROMPT = [3, 1, 4, 1, 5]
GREEDY = SamplingParams(temperature=0, max_tokens=6)
CONFIG = EngineConfig(kv_cache_memory="1MiB", max_model_len=64, max_num_seqs=8)


def assert_usable(engine: RolloutEngine, model: PreTrainedModel) -> None:
    batch = engine.generate_batch([PROMPT], GREEDY)
    batch.raise_for_errors()
    assert batch[0].completions[0].token_ids == oracle.greedy(model, PROMPT, 6)
    engine.core.scheduler.check()
