"""Logits of many given tokens never exist together."""

import pytest
import torch
from families import make_model
from scored import draw
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest storage that an operation gives, but for those that were there before."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.known = {t.untyped_storage().data_ptr() for t in known}
        self.nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("family", ["qwen3", "cohere2"])
def test_no_more_logits_than_a_chunk(family):
    """A fused and an unfused model, with logits that outweigh all else, stacks of small weights for their checksums too."""
    vocab, chunk = 4096, 32
    model = make_model(family, vocab_size=vocab)
    sequences = [draw(i, 60) for i in range(6)]
    with RolloutEngine(model, config=EngineConfig(max_num_batched_tokens=64, score_chunk_tokens=chunk)) as engine:
        for call in (
            lambda: engine.score(sequences, top_k=2, entropy=True),
            lambda: engine.generate_batch(sequences[:2], SamplingParams(max_tokens=1, prompt_logprobs=1)),
        ):
            engine.update_weights()
            known = [*model.parameters(), *(t for pair in engine._kv.layers for t in pair)]
            with LargestTensor(known) as largest:
                call()
            assert largest.nbytes == 4 * vocab * chunk
