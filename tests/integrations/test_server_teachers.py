"""A served model teaches TRL's trainers, through TRL's own client, where vLLM is not installed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trl_setup
from oracle import logits, logprobs_of_all

pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")

from stoker.integrations.server import Server, serve
from stoker.integrations.trl import attach, detach
from stoker.integrations.trl_teachers import without_vllm
from stoker.rollout import RolloutEngine


@pytest.fixture(name="teacher")
def a_teacher() -> Iterator[Server]:
    """What TRL's own client speaks to."""
    pytest.importorskip("trl", reason="TRL is not installed")
    model, reads = trl_setup.make_model(tie_word_embeddings=True), trl_setup.make_tokenizer()
    with RolloutEngine(model, tokenizer=reads) as engine, serve(engine, port=0) as server, without_vllm():
        yield server


def test_only_the_client_does_without_vllm() -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    from trl.generation import vllm_client, vllm_generation

    if vllm_client.is_vllm_available():
        pytest.skip("vLLM is installed")
    with pytest.raises(KeyError), without_vllm():
        assert vllm_client.is_vllm_available() and not vllm_generation.is_vllm_available()
        raise KeyError
    with pytest.raises(ImportError, match="vLLM is not installed"):
        vllm_client.VLLMClient("http://localhost:1")


def test_trls_client_gets_a_teachers_log_probabilities(teacher: Server) -> None:
    from trl.generation.vllm_client import VLLMClient

    sequences, starts = [[5, 3, 9, 4, 7], [3, 6, 4], [8, 5, 5, 5, 3, 9, 9]], [2, 1, 6]
    for chunk in (0, 2):
        said = VLLMClient(teacher.url).get_sequence_logprobs(
            sequences, starts, top_logprobs=3, temperature=1.5, chunk_size=chunk
        )
        for row, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
            table = logprobs_of_all(teacher._engine.model, sequence, 1.5)[start - 1 :]
            values, ids = table.topk(3)
            torch.testing.assert_close(torch.tensor(said["logprobs"][row]), values, atol=1e-4, rtol=0)
            assert said["logprob_token_ids"][row] == ids.tolist()
            taken = table.gather(1, torch.tensor(sequence[start:])[:, None])
            torch.testing.assert_close(torch.tensor(said["actual_logprobs"][row]), taken, atol=1e-4, rtol=0)


def test_trls_client_samples(teacher: Server) -> None:
    from trl.generation.vllm_client import VLLMClient

    said = VLLMClient(teacher.url).generate(["abc", "d"], n=2, max_tokens=3, logprobs=2)
    assert [len(ids) for ids in said["prompt_ids"]] == [3, 1] and len(said["completion_ids"]) == 4
    for row, ids in enumerate(said["completion_ids"]):
        table = logits(teacher._engine.model, said["prompt_ids"][row // 2], ids).log_softmax(-1)
        for token, likely, position in zip(ids, said["logprob_token_ids"][row], table, strict=True):
            assert token in likely and set(position.topk(2).indices.tolist()) <= set(likely)


@pytest.mark.parametrize("kind", ["server_distillation", "iw_opd"])
def test_a_trl_trainer_whose_teacher_is_served(tmp_path: Path, teacher: Server, kind: str) -> None:
    """The student is rolled out by an engine here, and its completions are scored by the teacher's."""
    settings: dict[str, Any] = {
        "teacher_model_server_url": teacher.url,
        "beta": 1.0,
        "loss_top_k": 1,
        "temperature": 0.8,
    }
    more = None
    if kind == "iw_opd":
        settings["use_teacher_server"], more = True, {"teacher_model": None}
    trainer = trl_setup.build(kind, str(tmp_path), more=more, **settings)
    told, score = [], trainer.teacher_client.get_sequence_logprobs

    def told_of(**asked: Any) -> Any:
        told.append((asked, score(**asked)))
        return told[-1][1]

    trainer.teacher_client.get_sequence_logprobs = told_of
    engine = attach(trainer)
    trainer.train()
    assert engine.weight_version == 3 and len(told) >= 3
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3 and all(map(math.isfinite, losses))
    for asked, said in told:
        assert asked["temperature"] == 0.8
        for sequence, start, taken in zip(
            asked["sequences"], asked["prompt_lengths"], said["actual_logprobs"], strict=True
        ):
            table = logprobs_of_all(teacher._engine.model, sequence, 0.8)[start - 1 :]
            by_hand = table.gather(1, torch.tensor(sequence[start:])[:, None])
            torch.testing.assert_close(torch.tensor(taken), by_hand, atol=1e-4, rtol=0)
    detach(trainer)
