"""Where ranks that run a model together come apart: all are told, none waits for ever, and they come together again."""

from __future__ import annotations

import pytest
import ranks
import together_faults


@pytest.mark.parametrize(
    "what",
    [
        together_faults.adapters_of_one_rank,
        together_faults.weights_found_at_different_times,
        together_faults.call_before_any_prompt_was_read,
        together_faults.fail_while_requests_are_made,
        together_faults.bad_arguments_of_one_rank,
        together_faults.threads,
        together_faults.pauses,
        together_faults.two_engines,
        together_faults.odd_vocabulary,
    ],
    ids=lambda function: function.__name__,
)
def test_one_of_two(what: object) -> None:
    ranks.run(what, 2, timeout=20)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "what", [together_faults.stay_away, together_faults.build_alone], ids=lambda function: function.__name__
)
def test_a_rank_that_stays_away(what: object) -> None:
    ranks.run(what, 2, timeout=4)  # type: ignore[arg-type]


def test_a_rank_that_dies() -> None:
    told, _ = ranks.run(together_faults.lose_a_rank, 2, dead=1)
    assert "rank 0 lost touch with ranks [1], with which it runs a model, while they were to generate_batch" in told


def test_two_models_of_two_ranks() -> None:
    ranks.run(together_faults.two_models, 4)


def test_the_rank_with_the_least_memory_counts() -> None:
    first, second = ranks.run(together_faults.unequal_memory, 2)
    assert first == second and first[0] == first[1] < first[2]
