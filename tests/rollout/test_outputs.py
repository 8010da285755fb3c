import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest
import torch

from stoker.kernels.errors import InvalidRequestError, RequestFailedError
from stoker.rollout.outputs import Completion, RolloutBatch, RolloutOutput


def completion(token_ids, index=0, version=3, **fields):
    defaults = {
        "index": index,
        "token_ids": token_ids,
        "logprobs": [-0.5 * (i + 1) for i in range(len(token_ids))],
        "top_logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "weight_versions": [version] * len(token_ids),
    }
    return Completion(**(defaults | fields))


def output(prompt, *completions, **fields):
    return RolloutOutput(prompt_token_ids=prompt, completions=list(completions), cached_tokens=0, **fields)


@pytest.fixture
def batch():
    return RolloutBatch(
        [
            output([5, 6, 7], completion([10, 11]), completion([12], index=1, version=4)),
            output([8], completion([13, 14, 15])),
        ]
    )


def test_tensors_are_padded_left_and_right(batch):
    tensors = batch.to_tensors(0)
    assert tensors.prompt_ids.tolist() == [[5, 6, 7], [5, 6, 7], [0, 0, 8]]
    assert tensors.prompt_mask.tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 1]]
    assert tensors.completion_ids.tolist() == [[10, 11, 0], [12, 0, 0], [13, 14, 15]]
    assert tensors.completion_mask.tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]
    assert tensors.logprobs.tolist() == [[-0.5, -1.0, 0.0], [-0.5, 0.0, 0.0], [-0.5, -1.0, -1.5]]
    assert tensors.weight_versions.tolist() == [[3, 3, -1], [4, -1, -1], [3, 3, 3]]
    assert tensors.logprobs.dtype == torch.float32
    assert {t.dtype for name, t in tensors._asdict().items() if name != "logprobs"} == {torch.int64}


def test_a_padding_id_that_is_a_real_token_is_masked(batch):
    tensors = batch.to_tensors(13)
    assert tensors.completion_ids[1].tolist() == [12, 13, 13]
    assert tensors.completion_mask[1].tolist() == [1, 0, 0]


def test_tensors_go_to_the_device_asked_for(batch):
    assert {t.device.type for t in batch.to_tensors(0, device="meta")} == {"meta"}


@pytest.mark.parametrize("value", [None, 1.0, True, "0"])
def test_a_padding_id_that_is_none_is_refused(batch, value):
    with pytest.raises(InvalidRequestError, match=r"pad_token_id=.*tokenizer.pad_token_id or its EOS id"):
        batch.to_tensors(value)


def test_a_padding_id_of_numpy(batch):
    assert batch.to_tensors(np.int64(9)).completion_ids.tolist() == batch.to_tensors(9).completion_ids.tolist()


def test_a_batch_of_whatever_gives_outputs(batch):
    made = RolloutBatch(o for o in batch)
    assert made == batch and len(made) == 2 and made.to_tensors(0).prompt_ids.shape == (3, 3)


@pytest.mark.parametrize("send", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_copy_has_the_text_and_no_tokenizer(send):
    def decode():  # a local function: not to be pickled
        return "hello"

    sent = send(completion([1, 2], _decode=decode))
    assert sent == completion([1, 2]) and sent.text == "hello" and vars(sent)["_decode"] is None
    assert send(completion([1])).text is None


def test_a_batch_as_plain_data():
    batch = RolloutBatch([output([5, 6], completion([1, 2], _decode=lambda: "hello"))])
    data = json.loads(json.dumps(dataclasses.asdict(batch)))
    assert data["outputs"][0]["completions"][0] == dataclasses.asdict(completion([1, 2]))


def test_an_empty_batch_has_no_tensors():
    with pytest.raises(InvalidRequestError, match=r"empty batch"):
        RolloutBatch([]).to_tensors(0)


def test_an_aborted_completion_may_be_empty():
    tensors = RolloutBatch([output([1, 2], completion([], finish_reason="abort"))]).to_tensors(0)
    assert tensors.prompt_ids.tolist() == [[1, 2]]
    assert {tuple(t.shape) for name, t in tensors._asdict().items() if not name.startswith("prompt")} == {(1, 0)}
    assert tensors.logprobs.dtype == torch.float32


def test_a_failed_request_is_raised_with_its_row(batch):
    error = RequestFailedError("logits were NaN")
    failed = output([9], completion([], finish_reason="error"), error=error)
    mixed = RolloutBatch([*batch, failed])
    batch.raise_for_errors()
    for call in (mixed.raise_for_errors, lambda: mixed.to_tensors(0)):
        with pytest.raises(RequestFailedError, match=r"^prompt 2: logits were NaN$") as raised:
            call()
        assert raised.value.__cause__ is error


def test_a_batch_is_a_sequence_in_the_order_of_its_prompts(batch):
    assert len(batch) == 2
    assert [o.prompt_token_ids for o in batch] == [[5, 6, 7], [8]]
    assert batch[-1] is batch.outputs[1]
    assert isinstance(batch[1:], RolloutBatch) and batch[1:].outputs == batch.outputs[1:]
    with pytest.raises(IndexError):
        batch[2]


def test_text_is_decoded_once_and_only_when_asked_for():
    calls = []
    with_text = completion([1], _decode=lambda: calls.append(1) or "hello")
    assert not calls
    assert with_text.text == with_text.text == "hello"
    assert calls == [1]
    assert completion([1]).text is None
    assert "_decode" not in repr(with_text)
    assert with_text == completion([1])
