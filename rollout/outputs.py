"""What a user gets back: token ids, log-probabilities, weight versions, and tensors made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.kernels.errors import InvalidRequestError, StokerError
from stoker.rollout.user_values import as_int, is_int, shown

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled completion.

    index: which of the prompt's ``n`` samples. token_ids: includes the final EOS or stop token; never empty unless
    ``finish_reason`` is "abort" or "error". logprobs: of each token, in nats, under the request's ``logprobs_mode``;
    same length as ``token_ids``. top_logprobs: at each token the most likely ids and their log-probabilities, where
    asked for. finish_reason: "stop" (EOS, stop id or stop string), "length" (``max_tokens`` or ``max_model_len``),
    "abort", "error". stop_reason: the id or string that ended it. weight_versions: the version each token was sampled
    under.
    """

    index: int
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[int, float]] | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    weight_versions: list[int]
    _decode: InitVar[Callable[[], str] | None] = None  # no field, so that ``dataclasses.asdict`` is plain data

    def __post_init__(self, _decode: Callable[[], str] | None) -> None:
        self.__dict__["_decode"] = _decode

    @cached_property
    def text(self) -> str | None:
        """Decoded without special tokens, cut before a stop string; None where the engine has no tokenizer."""
        decode: Callable[[], str] | None = self.__dict__["_decode"]
        return None if decode is None else decode()

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle has the text, and not the tokenizer that makes it."""
        return self.__dict__ | {"text": self.text, "_decode": None}


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """What the model says of N given tokens in a row; tensors on the host.

    token_ids: int64 [N]. logprobs: float32 [N], in nats. ranks: int64 [N], 1 more than the number of tokens with a
    larger logit. top_ids: int64 [N, K], the most likely first, and top_logprobs: float32 [N, K]; None where none were
    asked for. entropy: float32 [N], in nats; None where not asked for. error: set where the model gave NaN, or the
    sequence was aborted; what is not known is NaN.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor | None
    top_logprobs: torch.Tensor | None
    entropy: torch.Tensor | None
    error: StokerError | None = None


@dataclass(frozen=True, kw_only=True)
class RolloutOutput:
    """All completions of one prompt.

    prompt_token_ids: what the prompt was tokenised to. completions: ``n`` of them, by index. cached_tokens: how many of
    the prompt's tokens the prefix cache had. prompt_logprobs: of the prompt's tokens from the second on, where asked
    for; None too where the request ended before. prompt_inputs: of a prompt with images, what the model's forward takes
    besides token ids (``pixel_values`` and so on), as it was given. error: set where the request failed while running.
    """

    prompt_token_ids: list[int]
    completions: list[Completion]
    cached_tokens: int
    prompt_logprobs: TokenLogprobs | None = None
    prompt_inputs: Mapping[str, torch.Tensor] | None = field(default=None, compare=False, repr=False)
    error: StokerError | None = None


class RolloutTensors(NamedTuple):
    """One row a completion, prompts in order, the samples of a prompt side by side: B rows.

    prompt_ids, prompt_mask: int64 [B, P], left-padded; the mask is 1 at tokens and 0 at padding. completion_ids,
    completion_mask: int64 [B, C], right-padded. logprobs: float32 [B, C], in nats, 0 where padded. weight_versions:
    int64 [B, C], -1 where padded.
    """

    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    completion_ids: torch.Tensor
    completion_mask: torch.Tensor
    logprobs: torch.Tensor
    weight_versions: torch.Tensor


@dataclass(frozen=True)
class RolloutBatch(Sequence[RolloutOutput]):
    """The outputs of one ``generate_batch`` call, in the order of its prompts; or any outputs, as those of handles."""

    outputs: list[RolloutOutput]

    def __post_init__(self) -> None:
        object.__setattr__(self, "outputs", list(self.outputs))  # it may have been a generator

    def __len__(self) -> int:
        return len(self.outputs)

    @overload
    def __getitem__(self, index: int) -> RolloutOutput: ...
    @overload
    def __getitem__(self, index: slice) -> RolloutBatch: ...
    def __getitem__(self, index: int | slice) -> RolloutOutput | RolloutBatch:
        return RolloutBatch(self.outputs[index]) if isinstance(index, slice) else self.outputs[index]

    def __iter__(self) -> Iterator[RolloutOutput]:
        return iter(self.outputs)

    def raise_for_errors(self) -> None:
        """Raise the first failed request's error, naming its row; do nothing where all succeeded."""
        for row, output in enumerate(self.outputs):
            if output.error is not None:
                raise type(output.error)(f"prompt {row}: {output.error}") from output.error

    def to_tensors(self, pad_token_id: int, *, device: str | torch.device = "cpu") -> RolloutTensors:
        """Padded tensors for a training step, on ``device``. pad_token_id: what rows are filled up with.

        Images are not among them: a forward takes them from the outputs' ``prompt_inputs``.

        Raises the error of a failed request, and ``InvalidRequestError`` for an empty batch or a padding id that is
        no integer.
        """
        pad_token_id = as_int(pad_token_id)
        if not is_int(pad_token_id):
            raise InvalidRequestError(
                f"pad_token_id={shown(pad_token_id)}: give an integer, for example tokenizer.pad_token_id or its EOS id"
            )
        if not self.outputs:
            raise InvalidRequestError("an empty batch has no tensors")
        self.raise_for_errors()
        prompts = [o.prompt_token_ids for o in self.outputs for _ in o.completions]
        completions = [c for o in self.outputs for c in o.completions]
        of_prompts = _places([len(p) for p in prompts], at_the_end=True)
        of_completions = _places([len(c.token_ids) for c in completions])

        def padded(rows: Iterable[list[Any]], places: NDArray[np.bool_], padding: float, dtype: type) -> torch.Tensor:
            whole: NDArray[Any] = np.full(places.shape, padding, dtype)
            whole[places] = np.fromiter(chain.from_iterable(rows), dtype)  # by far faster than torch.tensor(lists)
            return torch.from_numpy(whole).to(device)

        return RolloutTensors(
            prompt_ids=padded(prompts, of_prompts, pad_token_id, np.int64),
            prompt_mask=torch.from_numpy(of_prompts).to(device, torch.int64),
            completion_ids=padded((c.token_ids for c in completions), of_completions, pad_token_id, np.int64),
            completion_mask=torch.from_numpy(of_completions).to(device, torch.int64),
            logprobs=padded((c.logprobs for c in completions), of_completions, 0.0, np.float32),
            weight_versions=padded((c.weight_versions for c in completions), of_completions, -1, np.int64),
        )


def _places(lengths: list[int], *, at_the_end: bool = False) -> NDArray[np.bool_]:
    """Mask [rows, longest] of where rows of these lengths lie: at the beginning or at the end."""
    columns, counts = np.arange(max(lengths)), np.array(lengths)[:, None]
    places: NDArray[np.bool_] = columns >= len(columns) - counts if at_the_end else columns < counts
    return places
