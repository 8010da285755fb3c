import math
from types import MappingProxyType

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, PreTrainedConfig

from stoker.kernels.errors import InvalidRequestError, StokerError
from stoker.rollout import sampling_params as module
from stoker.rollout.sampling_params import SamplingParams


def test_defaults_sample_from_the_full_distribution():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.stop, params.stop_token_ids) == (16, 0, (), ())
    assert params.logprobs_mode == "scaled" and params.seed is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("n", v) for v in (0, -1, 1.0, True, "2", None)),
        *(("max_tokens", v) for v in (0, -5, 2.5, "8")),
        *(("min_tokens", v) for v in (-1, 0.5)),
        *(("top_k", v) for v in (-1, 3.0, None)),
        *(("logprobs", v) for v in (-1, 1.5, None, True)),
        *(("temperature", v) for v in (-0.1, math.nan, math.inf, "1", None, True)),
        *(("top_p", v) for v in (0.0, -0.5, 1.01, math.nan)),
        *(("min_p", v) for v in (-0.1, 1.1, math.nan)),
        *(("repetition_penalty", v) for v in (0.0, -1.0, math.inf)),
        *(("presence_penalty", v) for v in (math.nan, math.inf)),
        *(("frequency_penalty", v) for v in (math.nan, "0")),
        *(("stop", v) for v in ("", ("a", ""), (1,), 3, None)),
        *((f"{kind}_token_ids", v) for kind in ("stop", "suppress") for v in ((-1,), (1.5,), ("2",), (True,), 7, None)),
        *(
            ("logit_bias", v)
            for v in ({-1: 1.0}, {1.5: 1.0}, {"2": 1.0}, {True: 1.0}, {3: math.inf}, {3: "1"}, {3: True})
        ),
        *(("logit_bias", v) for v in ([3], [(3, 1.0, 2)], 7, None, "no")),
        *(("seed", v) for v in (1.5, "0", True)),
        *(("logprobs_mode", v) for v in ("scale", None, np.array([1, 2]))),
        *(("ignore_eos", v) for v in ("no", 1, None)),
    ],
)
def test_a_bad_value_is_refused_by_name(field, value):
    with pytest.raises(InvalidRequestError, match=rf"^{field}=") as error:
        SamplingParams(**{field: value})
    assert repr(value) in str(error.value)
    assert isinstance(error.value, StokerError) and isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_p": 0.0}, "above 0 and at most 1"),
        ({"temperature": -1.0}, "a finite number at least 0 and"),
        ({"temperature": 1e-45}, r"^temperature=1e-45: give 0 \(greedy\), or at least 1e-15"),
        ({"temperature": 1e39}, r"at most 1e\+15$"),
        ({"temperature": 10**400}, r"at most 1e\+15$"),  # too large for a float
        ({"repetition_penalty": 1e-45}, r"at least 1e-15 and at most 1e\+15"),
        ({"repetition_penalty": 1e39}, r"at most 1e\+15$"),
        ({"presence_penalty": -1e39}, r"at least -1e\+15"),
        ({"frequency_penalty": 1e39}, r"at most 1e\+15$"),
        ({"presence_penalty": math.nan}, "a finite number at least"),
        ({"n": 0}, "an integer of at least 1"),
        ({"max_tokens": 0}, r"an integer of at least 1 \(None is as many as there is room for\)$"),
        ({"seed": 0.5}, "an integer$"),
        ({"logprobs_mode": "x"}, "scaled, raw, processed"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 is above max_tokens=4"),
    ],
)
def test_the_message_names_the_accepted_range(fields, message):
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**fields)


def test_values_become_plain_python():
    params = SamplingParams(
        n=np.int64(2), seed=np.int64(3), temperature=np.float32(0.5), top_p=1, stop="###", stop_token_ids=[np.int64(4)]
    )
    assert [type(v) for v in (params.n, params.seed, params.temperature, params.top_p)] == [int, int, float, float]
    assert params.stop == ("###",) and params.stop_token_ids == (4,)
    assert params == SamplingParams(n=2, seed=3, temperature=0.5, stop=["###"], stop_token_ids=(4,))
    assert hash(params) is not None


def test_integers_of_torch_are_integers():
    params = SamplingParams(n=torch.tensor(2), max_tokens=torch.tensor(3), stop_token_ids=list(torch.tensor([4, 5])))
    assert params == SamplingParams(n=2, max_tokens=3, stop_token_ids=(4, 5))
    assert {type(v) for v in (params.n, params.max_tokens, *params.stop_token_ids)} == {int}


@pytest.mark.parametrize("number", [np.array(0.5), np.float16(0.5), torch.tensor(0.5), torch.tensor(0.5).bfloat16()])
def test_what_a_schedule_computes_is_a_number(number):
    params = SamplingParams(temperature=number, top_p=number, min_p=number, logit_bias={5: number})
    assert params == SamplingParams(temperature=0.5, top_p=0.5, min_p=0.5, logit_bias={5: 0.5})
    assert type(params.temperature) is type(params.logit_bias[0][1]) is float


@pytest.mark.parametrize(
    "number", [np.array([0.5]), np.array(True), torch.tensor([0.5]), torch.tensor(True), torch.tensor(1j)]
)
def test_other_tensors_are_no_numbers(number):
    for name in ("temperature", "top_p", "presence_penalty"):
        with pytest.raises(InvalidRequestError, match=rf"^{name}=.*: it has to be a finite number"):
            SamplingParams(**{name: number})
    with pytest.raises(InvalidRequestError, match="^logit_bias="):
        SamplingParams(logit_bias={5: number})


def test_edges_are_accepted():
    SamplingParams(temperature=0, top_p=1e-9, min_p=1.0, min_tokens=16, seed=-1, presence_penalty=-2)


def test_unknown_and_positional_arguments_are_refused():
    with pytest.raises(TypeError):
        SamplingParams(max_new_tokens=4)
    with pytest.raises(TypeError):
        SamplingParams(2)


def test_a_default_generation_config_is_greedy():
    assert SamplingParams.from_generation_config(GenerationConfig()) == SamplingParams(temperature=0.0)


def test_generation_config_fields_are_translated():
    config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.1,
        max_new_tokens=32,
        min_new_tokens=2,
        num_return_sequences=4,
        stop_strings=["\n\n"],
        eos_token_id=[1, 2],
        suppress_tokens=[4],
        sequence_bias={(6,): 1.5},
        max_length=4096,  # max_new_tokens wins, as it does under generate
    )
    assert SamplingParams.from_generation_config(config) == SamplingParams(
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.1,
        max_tokens=32,
        min_tokens=2,
        n=4,
        stop=("\n\n",),
        stop_token_ids=(1, 2),
        suppress_token_ids=(4,),
        logit_bias={6: 1.5},
    )
    assert SamplingParams.from_generation_config(config, max_tokens=8, n=1).max_tokens == 8
    assert SamplingParams.from_generation_config(config.to_dict()) == SamplingParams.from_generation_config(config)


def test_all_of_transformers_own_defaults_are_translated():
    defaults = GenerationConfig._get_default_generation_params()
    params = SamplingParams.from_generation_config(defaults, max_tokens=3)
    assert params == SamplingParams(temperature=0.0, max_tokens=3)


def test_unset_top_k_is_the_50_of_generate():
    assert SamplingParams.from_generation_config(GenerationConfig(do_sample=True)).top_k == 50
    assert SamplingParams.from_generation_config(GenerationConfig(do_sample=True, top_k=0)).top_k == 0
    assert SamplingParams.from_generation_config(GenerationConfig(do_sample=True), top_k=0).top_k == 0


def test_greedy_ignores_the_sampling_fields():
    params = SamplingParams.from_generation_config({"do_sample": False, "temperature": 0.6, "top_p": 0.5, "top_k": 9})
    assert params == SamplingParams(temperature=0.0)


@pytest.mark.parametrize("eos", [5, np.int64(5), [5], np.array([5]), torch.tensor(5), torch.tensor([5])])
def test_one_eos_id(eos):
    assert SamplingParams.from_generation_config(GenerationConfig(eos_token_id=eos)).stop_token_ids == (5,)


def test_any_mapping_will_do():
    fields = {"do_sample": True, "temperature": 0.5, "top_k": 3}
    expected = SamplingParams(temperature=0.5, top_k=3)
    assert SamplingParams.from_generation_config(MappingProxyType(fields)) == expected


@pytest.mark.parametrize("config", [None, "greedy", PreTrainedConfig(), SamplingParams()])
def test_what_is_no_generation_config_is_refused(config):
    with pytest.raises(
        InvalidRequestError, match=r"^config is a \w+: give a GenerationConfig, as model.generation_conf"
    ):
        SamplingParams.from_generation_config(config)


@pytest.mark.parametrize("kind", [dict, GenerationConfig])
def test_names_that_would_be_dropped_are_refused(kind):
    with pytest.raises(
        InvalidRequestError, match=r"^generation config sets max_tokens, stop, a field of .*keyword arg"
    ):
        SamplingParams.from_generation_config(kind(do_sample=True, max_tokens=7, stop="x"))
    assert SamplingParams.from_generation_config({"max_tokens": None, "do_sample": False}, max_tokens=7).max_tokens == 7


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("max_new_token", "max_new_tokens"),
        ("topk", "top_k"),
        ("Top-P", "top_p"),
        ("repetition_penality", "repetition_penalty"),
        ("eos_token_ids", "eos_token_id"),
        ("num_beam", "num_beams"),
        ("dosample", "do_sample"),
    ],
)
def test_a_misspelt_name_in_a_mapping_is_refused(name, meant):
    """Sampling went on as if it had not been given."""
    with pytest.raises(InvalidRequestError, match=f"sets {name}, which is no field of transformers': {meant} is"):
        SamplingParams.from_generation_config({"do_sample": True, name: 2}, max_tokens=3)
    SamplingParams.from_generation_config({"do_sample": True, name: None}, max_tokens=3)


def test_other_names_in_a_mapping_are_those_of_files():
    """Of the hub, which have what other engines read, and of transformers, which does not change what is sampled."""
    names = "chat_format max_context_size max_window_size stop_words_ids eot_token_id user_token_id enable_thinking "
    names += "transformers_version _from_model_config trust_remote_code max_sequence_length no_speech_threshold"
    read = {*module._GENERATION_FIELDS, *module._UNSUPPORTED_GENERATION_FIELDS}
    unread = vars(GenerationConfig()).keys() - read - {"do_sample", "eos_token_id", "max_length"}
    given = {**dict.fromkeys([*names.split(), *unread], 1), "do_sample": True}
    assert SamplingParams.from_generation_config(given, max_tokens=3).max_tokens == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_beams", 2),
        ("typical_p", 0.5),
        ("no_repeat_ngram_size", 3),
        ("bad_words_ids", [[1]]),
        ("guidance_scale", 1.5),
        *(
            ("sequence_bias", v)
            for v in ({(3, 4): 1.0}, {(3,): 1.0, (4, 5): 1.0}, 5, [3], [[[[1]], 2.0]], {("3",): 1.0})
        ),
        ("begin_suppress_tokens", [3]),
        ("forced_eos_token_id", 2),
        ("min_length", 7),
        ("max_time", 1.0),
        ("output_scores", True),
    ],
)
def test_what_the_engine_does_not_do_is_refused(field, value):
    with pytest.raises(InvalidRequestError, match=rf"{field}=.*unset it, or use model.generate"):
        SamplingParams.from_generation_config({field: value})


def test_a_total_length_bound_is_refused():
    with pytest.raises(InvalidRequestError, match=r"max_length.*set max_new_tokens, or pass max_tokens="):
        SamplingParams.from_generation_config(GenerationConfig(max_length=100))
    assert SamplingParams.from_generation_config(GenerationConfig(max_length=100), max_tokens=4).max_tokens == 4
