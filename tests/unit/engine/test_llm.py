"""From a folder on disk to tokens and text, on a tiny real GPTQ checkpoint."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.tiny_tokenizer import write_tokenizer
from terrazzo.engine.config import EngineConfig
from terrazzo.engine.llm import LLM
from terrazzo.engine.request import FinishReason, SamplingParams, TopLogprobs
from terrazzo.errors import MissingFileError, RequestError
from terrazzo.kernels.policy import KernelPolicy

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "llama-w4-g128-sym"
CONFIG = EngineConfig(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64, page_size=4)
GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
PROMPTS = [[5, 17, 200, 3, 90], [1], list(range(40, 60))]


@pytest.fixture(scope="module")
def bare() -> LLM:
    """No tokenizer, no generation config."""
    return LLM(GOLDEN, CONFIG)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """The same model with a tokenizer of its vocabulary's size."""
    folder = tmp_path_factory.mktemp("speaking")
    for name in ("config.json", "model.safetensors", "quantize_config.json"):
        shutil.copy(GOLDEN / name, folder)
    write_tokenizer(folder, vocab_size=256)
    recommended = {"temperature": 0.6, "top_k": 9, "eos_token_id": [3, 999]}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    return LLM(folder, CONFIG)


def test_logits_are_those_of_gptqmodel() -> None:
    golden = load_file(GOLDEN / "golden.safetensors")
    bare = LLM(GOLDEN, replace(CONFIG, kernel_policy=KernelPolicy.SPEED))
    for ids, expected in zip(golden["input_ids"].tolist(), golden["logits"], strict=True):
        logits = bare.logits(ids)
        assert (logits.dtype, logits.shape) == (torch.float32, expected.shape)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_greedy_tokens_are_the_argmax_of_teacher_forced_logits(bare: LLM) -> None:
    for prompt, completion in zip(PROMPTS, bare.generate(PROMPTS, GREEDY), strict=True):
        whole = [*prompt, *completion.token_ids]
        expected = bare.logits(whole).argmax(dim=-1)[len(prompt) - 1 : -1].tolist()
        assert list(completion.token_ids) == expected
        assert completion.finish in (FinishReason.LENGTH, FinishReason.STOP)


def test_a_cached_prefix_changes_no_token(bare: LLM) -> None:
    prompt = list(range(100, 130))
    first, again = (bare.generate(prompt, GREEDY)[0] for _ in range(2))
    assert (first.cached_tokens, again.cached_tokens) == (0, 28)
    assert first.token_ids == again.token_ids


def test_batch_mates_change_no_sampled_token(bare: LLM) -> None:
    params = SamplingParams(seed=11, max_tokens=10, top_p=0.9)
    alone = [bare.generate(prompt, params)[0].token_ids for prompt in PROMPTS]
    assert [each.token_ids for each in bare.generate(PROMPTS, params)] == alone


def test_prompt_logprobs_match_the_logits(bare: LLM) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=TopLogprobs(1))
    (completion,) = bare.generate(PROMPTS[2], params)
    logprobs = bare.logits(PROMPTS[2]).log_softmax(dim=-1)
    expected = [logprobs[i, token].item() for i, token in enumerate(PROMPTS[2][1:])]
    seen = [each.logprob for each in completion.prompt_logprobs]
    assert seen == pytest.approx(expected, abs=1e-4)


def test_without_a_tokenizer_text_is_an_error_and_tokens_work(bare: LLM) -> None:
    assert bare.generate([1, 2], GREEDY)[0].text == ""
    with pytest.raises(MissingFileError, match=r"tokenizer\.json is not there"):
        bare.generate("hello")


@pytest.mark.parametrize("ids", [[], [256], [-1], [0] * 257])
def test_logits_of_illegal_tokens_are_refused(bare: LLM, ids: list[int]) -> None:
    with pytest.raises(RequestError, match="legal"):
        bare.logits(ids)


def test_one_bad_prompt_stops_all_before_they_run(bare: LLM) -> None:
    with pytest.raises(RequestError, match="the prompt has 64 tokens"):
        bare.generate([[1], [1] * 64])
    with pytest.raises(RequestError, match="mixes token ids"):
        bare.generate([1, "a"])  # type: ignore[list-item]
    assert bare.engine.stats.num_waiting == 0
    assert bare.generate([1], GREEDY)[0].finish is not FinishReason.ABORTED


def test_text_is_what_the_tokens_decode_to(speaking: LLM) -> None:
    completion, other = speaking.generate(["a fox", "stones"], GREEDY)
    assert completion.prompt_token_ids == speaking.tokenizer.encode("a fox")
    for each in (completion, other):
        assert each.text == speaking.tokenizer.decode(each.token_ids)


def test_recommended_parameters_are_the_default(speaking: LLM) -> None:
    params = speaking.default_params(max_tokens=7)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 9, 7)


def test_eos_ids_of_all_files_count_unless_the_model_lacks_them(speaking: LLM) -> None:
    assert speaking.engine.vocabulary.eos_token_ids == {1, 2, 3}
    (completion,) = speaking.generate("stones", SamplingParams(min_tokens=3, max_tokens=3))
    assert not {1, 2, 3} & set(completion.token_ids)


def test_chat_prompts_with_the_template(speaking: LLM) -> None:
    messages = [{"role": "user", "content": "a fox"}]
    completion = speaking.chat(messages, GREEDY)
    assert completion.prompt_token_ids == speaking.tokenizer.encode_chat(messages)
    assert completion.choices[0].token_ids == completion.token_ids


def test_a_stream_joins_to_the_completion(speaking: LLM) -> None:
    params = SamplingParams(n=2, seed=3, max_tokens=6, logprobs=TopLogprobs(2))
    (whole,) = speaking.generate("stones", params)
    deltas = list(speaking.stream("stones", params))
    for choice in whole.choices:
        own = [delta for delta in deltas if delta.index == choice.index]
        assert "".join(delta.text for delta in own) == choice.text
        assert len(choice.logprobs) == len(choice.token_ids) == sum(len(d.token_ids) for d in own)


def test_a_closed_stream_ends_its_request(speaking: LLM) -> None:
    stream = speaking.stream("stones", GREEDY)
    next(stream)
    stream.close()
    assert len(speaking.generate("stones", GREEDY)) == 1
    assert speaking.engine.stats.pages_used == 0


def test_the_memory_plan_is_known(bare: LLM) -> None:
    assert "64 pages (all that 4 sequences can use)" in str(bare.memory_plan)
    assert bare.max_model_len == 64
