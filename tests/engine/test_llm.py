"""`LLM`: prompts in every form, text and stop strings, ends, errors by name, and that nothing is
left behind."""

import logging
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_models import make_tiny
from text.backends import TEMPLATE, byte_level_backend, write_folder

from pdserve.engine.llm import LLM, CompletionOutput, RequestOutput, SamplingParams
from pdserve.text.stop import StopStrings
from pdserve.text.tokenizer import Tokenizer

EOS = 2  # <|im_end|>


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = byte_level_backend()
    path = tmp_path_factory.mktemp("llm")
    make_tiny("llama3", path, vocab_size=backend.get_vocab_size(), eos_token_id=EOS)
    write_folder(path, backend, eos_token="<|im_end|>", chat_template=TEMPLATE)
    return path


@pytest.fixture(scope="module")
def shared_llm(folder: Path) -> LLM:
    return LLM(str(folder), device="cpu", num_kv_blocks=128)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    yield shared_llm
    assert_empty(shared_llm)


def tokenizer_of(llm: LLM) -> Tokenizer:
    assert llm.tokenizer is not None
    return llm.tokenizer


def assert_empty(llm: LLM) -> None:
    assert not llm.engine.has_work and llm.engine.blocks.num_owned == 0
    llm.engine.check_integrity()


def generate(llm: LLM, prompts: Any, **sampling: Any) -> list[RequestOutput]:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, **sampling})
    return llm.generate(prompts, params, use_tqdm=False)


def one(llm: LLM, prompt: Any = "The quick", **sampling: Any) -> CompletionOutput:
    [output] = generate(llm, prompt, **sampling)
    assert output.finished
    return output.outputs[0]


def test_every_form_of_a_prompt(llm: LLM) -> None:
    text = "The quick brown fox"
    ids = tokenizer_of(llm).encode(text)
    forms = [text, ids, tuple(ids), {"prompt_token_ids": ids}, np.array(ids)]
    expected = one(llm, text)
    for form in forms:
        [output] = generate(llm, form)
        assert (
            output.outputs[0].token_ids == expected.token_ids
            and output.outputs[0].text == expected.text
        )
        assert output.prompt_token_ids == ids and all(
            type(i) is int for i in output.prompt_token_ids
        )
        assert output.prompt == (text if form is text else None)
    outputs = generate(llm, forms)
    assert [output.outputs[0].token_ids for output in outputs] == [expected.token_ids] * len(forms)
    assert [int(output.request_id) for output in outputs] == sorted(
        int(output.request_id) for output in outputs
    )
    assert generate(llm, []) == []


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[i + 3] * (1 + 7 * i) for i in range(6)]
    params = [
        SamplingParams(temperature=0, max_tokens=12 - 2 * i, ignore_eos=True) for i in range(6)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12, 10, 8, 6, 4, 2]


def test_text_is_the_detokenised_tokens(llm: LLM) -> None:
    completion = one(llm, max_tokens=100)
    assert completion.text == tokenizer_of(llm).decode(completion.token_ids)
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    every = one(llm, max_tokens=100, skip_special_tokens=False)
    assert every.text == tokenizer_of(llm).decode(completion.token_ids, skip_special_tokens=False)


def test_without_a_tokenizer(folder: Path, llm: LLM) -> None:
    bare = LLM(str(folder), tokenizer=False, device="cpu", num_kv_blocks=32)
    completion = one(bare, [5, 6, 7])
    assert completion.text == "" and completion.token_ids == one(llm, [5, 6, 7]).token_ids
    with pytest.raises(ValueError, match="text prompt needs a tokenizer"):
        one(bare, "text")
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        one(bare, [5], stop="x")
    with pytest.raises(ValueError, match="chat needs a tokenizer"):
        bare.chat([{"role": "user", "content": "hi"}])


def test_n_choices(llm: LLM) -> None:
    [output] = generate(llm, "The quick", n=3, temperature=1.0, seed=4)
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3
    assert output.outputs[0].token_ids == one(llm, temperature=1.0, seed=4).token_ids
    assert [c.token_ids for c in output.outputs] == [
        c.token_ids
        for c in generate(llm, ["x", "The quick"], n=3, temperature=1.0, seed=4)[1].outputs
    ]


def test_seeds(folder: Path) -> None:
    first, second = (LLM(str(folder), device="cpu", num_kv_blocks=32, seed=seed) for seed in (5, 5))
    third = LLM(str(folder), device="cpu", num_kv_blocks=32, seed=6)
    runs = [
        [one(llm, temperature=1.0).token_ids for _ in range(2)] for llm in (first, second, third)
    ]
    assert runs[0] == runs[1] != runs[2] and runs[0][0] != runs[0][1]


def stop_at(text: str, stop: str) -> str:
    return text[: text.index(stop)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(6))
def test_stop_strings_across_token_borders(llm: LLM, seed: int) -> None:
    """Any piece of the text that would come ends it there, wherever its tokens begin and end."""
    full = one(llm, temperature=1.0, seed=seed, max_tokens=60)
    rng = random.Random(seed)
    clean = [i for i in range(5, len(full.text) - 6) if "\ufffd" not in full.text[i : i + 6]]
    for length in (1, 2, 6):
        at = rng.choice(clean)
        stop = full.text[at : at + length]
        completion = one(llm, temperature=1.0, seed=seed, max_tokens=60, stop=["never-there", stop])
        assert completion.text == stop_at(full.text, stop)
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.token_ids == full.token_ids[: len(completion.token_ids)]
        shown = one(
            llm,
            temperature=1.0,
            seed=seed,
            max_tokens=60,
            stop=stop,
            include_stop_str_in_output=True,
        )
        assert shown.text == stop_at(full.text, stop) + stop


def test_a_stop_string_ends_one_choice_only(llm: LLM) -> None:
    sampling = {"n": 3, "temperature": 1.0, "seed": 2, "max_tokens": 40}
    [full] = generate(llm, "The quick", **sampling)
    texts = [c.text for c in full.outputs]
    stop = next(
        t
        for i in range(5, 60)
        if (t := texts[1][i : i + 4]) not in texts[0] + texts[2] and "\ufffd" not in t
    )
    [output] = generate(llm, "The quick", stop=stop, **sampling)
    assert [c.finish_reason for c in output.outputs] == ["length", "stop", "length"]
    assert [c.text for c in output.outputs] == [texts[0], stop_at(texts[1], stop), texts[2]]


def test_no_stop_string_within_min_tokens(llm: LLM) -> None:
    full = one(llm, max_tokens=60)
    pieces = map(tokenizer_of(llm).token_text, full.token_ids)
    at, stop = next((i, piece) for i, piece in enumerate(pieces) if i and piece and piece.isascii())
    assert len(one(llm, max_tokens=60, stop=stop).token_ids) <= at + 1
    later = one(llm, max_tokens=60, stop=stop, min_tokens=30)
    assert len(later.token_ids) > 30
    last = one(llm, max_tokens=at + 1, min_tokens=at + 1, stop=stop)  # the limit comes first
    assert (last.finish_reason, last.text) == (
        "length",
        tokenizer_of(llm).decode(full.token_ids[: at + 1]),
    )


def test_stop_token_ids(llm: LLM) -> None:
    full = one(llm)
    stop = full.token_ids[7]
    at = full.token_ids.index(stop)
    completion = one(llm, stop_token_ids=[stop])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.token_ids == full.token_ids[: at + 1]
    assert completion.text == tokenizer_of(llm).decode(full.token_ids[:at])
    shown = one(llm, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert shown.text == tokenizer_of(llm).decode(full.token_ids[: at + 1])
    assert (
        one(llm, stop_token_ids=[stop], min_tokens=at + 1).token_ids[: at + 1]
        != full.token_ids[: at + 1]
    )


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_end_of_sequence(llm: LLM, skip_special_tokens: bool) -> None:
    """Its own text is hidden, whether or not other special tokens are shown."""
    ended = one(
        llm, ignore_eos=False, logit_bias={EOS: 100.0}, skip_special_tokens=skip_special_tokens
    )
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason, ended.text) == (
        [EOS],
        "stop",
        None,
        "",
    )
    ignored = one(
        llm, logit_bias={EOS: 100.0}, max_tokens=3, skip_special_tokens=skip_special_tokens
    )
    assert ignored.token_ids == [EOS] * 3 and ignored.finish_reason == "length"
    assert ignored.text == ("" if skip_special_tokens else "<|im_end|>" * 3)
    late = one(llm, ignore_eos=False, logit_bias={EOS: 100.0}, min_tokens=4)
    assert len(late.token_ids) == 5 and EOS not in late.token_ids[:4]


def test_max_tokens_and_the_models_length(folder: Path, llm: LLM) -> None:
    assert len(one(llm, max_tokens=1).token_ids) == 1
    short = LLM(str(folder), device="cpu", num_kv_blocks=32, max_model_len=40)
    completion = one(short, [7] * 30, max_tokens=None)
    assert (len(completion.token_ids), completion.finish_reason) == (10, "length")
    assert len(one(short, [7] * 39, max_tokens=100).token_ids) == 1
    with pytest.raises(ValueError, match="prompt has 40 tokens, but a request may have 40 in all"):
        one(short, [7] * 40)
    with pytest.raises(
        ValueError,
        match=r"engine\.max_model_len \(513\) must not be above what the model takes, 512",
    ):
        LLM(str(folder), device="cpu", num_kv_blocks=3, max_model_len=513)
    tight = LLM(str(folder), device="cpu", num_kv_blocks=3)
    assert len(one(tight, [7] * 20, max_tokens=None).token_ids) == 12
    whole = LLM(str(folder), device="cpu", num_kv_blocks=64)
    # max_position_embeddings is 512
    assert len(one(whole, [7] * 500, max_tokens=None).token_ids) == 12
    for each in (short, tight, whole):
        assert_empty(each)


def test_logprobs(llm: LLM) -> None:
    [output] = generate(llm, "The quick brown", logprobs=2, prompt_logprobs=1, max_tokens=5)
    completion = output.outputs[0]
    assert [entry.token_id for entry in completion.logprobs or ()] == completion.token_ids
    assert [entry and entry.token_id for entry in output.prompt_logprobs or ()] == [
        None,
        *output.prompt_token_ids[1:],
    ]
    assert one(llm).logprobs is None and one(llm).cumulative_logprob is None


def test_cached_tokens_are_reported(llm: LLM) -> None:
    prompt = [9] * 40
    generate(llm, prompt)
    assert generate(llm, prompt)[0].num_cached_tokens == 32


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "It's a dog's life"}]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    [output] = llm.chat(conversation, params, use_tqdm=False)
    text = "<|im_start|>user\nIt's a dog's life<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids == tokenizer_of(llm).encode(text, add_special_tokens=False)
    [first, second] = llm.chat(
        [conversation, [*conversation, *conversation]], params, use_tqdm=False
    )
    assert first.outputs[0].token_ids == output.outputs[0].token_ids
    assert len(second.prompt_token_ids) > len(first.prompt_token_ids)
    [bare] = llm.chat(conversation, params, use_tqdm=False, add_generation_prompt=False)
    assert len(bare.prompt_token_ids) < len(output.prompt_token_ids)
    with pytest.raises(ValueError, match="unknown role alien"):
        llm.chat([{"role": "alien", "content": "hi"}], params)


def test_the_progress_bar_can_be_switched_off(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    generate(llm, ["a", "b"])
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b"], SamplingParams(max_tokens=2))
    assert "generating" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prompts", "sampling", "named"),
    [
        ([[]], {}, "prompt must hold at least one token"),
        ([[-1]], {}, "prompt holds a token id outside"),
        ([[100_000]], {}, "prompt holds a token id outside"),
        ([[1.5, 2.5]], {}, "prompt must be text"),
        ([[True, 2]], {}, "prompt must be text"),
        ([None], {}, "prompt must be text"),
        ([{"prompt": "text"}], {}, "only prompt_token_ids"),
        ([{"prompt_token_ids": [3, "4"]}], {}, "prompt must be text"),
        (["ok", [1] * 600], {}, "prompt has 600 tokens"),
        (["ok"], {"n": 500}, "n is 500, but a step runs at most 256"),
        (["ok"], {"stop_token_ids": [100_000]}, "stop_token_ids holds token id 100000"),
        (["ok"], {"logit_bias": {100_000: 1.0}}, "logit_bias holds token id 100000"),
        (["lone \ud800 surrogate"], {}, "lone surrogate"),
    ],
)
def test_what_can_never_run_is_refused_before_anything_runs(
    llm: LLM, prompts: list, sampling: dict, named: str
) -> None:
    steps = llm.engine.stats.num_steps
    with pytest.raises(ValueError, match=named):
        generate(llm, ["fine", *prompts], **sampling)
    assert llm.engine.stats.num_steps == steps


def test_params_are_one_for_all_or_one_each(llm: LLM) -> None:
    with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(ValueError, match="sampling_params must be"):
        llm.generate(["a"], [{"temperature": 0}])  # type: ignore[list-item]
    assert len(llm.generate("a", use_tqdm=False)[0].outputs[0].token_ids) <= 16


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"blok_size": 16}, "did you mean 'block_size'"),
        ({"dtype": "int8"}, "dtype"),
        ({"load_format": "gguf"}, "load_format"),
        ({"quantization": "fp4"}, "quantization"),
        ({"device": "tpu"}, "device"),
        ({"tokenizer": "nowhere"}, "tokenizer path 'nowhere'"),
        ({"num_kv_blocks": None, "kv_memory_bytes": 100}, "KV cache.*raise kv_memory_bytes"),
        ({"device": "cuda", "deterministic": True}, "engine.device is 'cuda'|engine.deterministic"),
    ],
)
def test_bad_settings_are_refused_by_name(folder: Path, keywords: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LLM(str(folder), **{"device": "cpu", "num_kv_blocks": 16, **keywords})


def test_shards_and_whole_files_are_the_same_model(folder: Path, tmp_path: Path, llm: LLM) -> None:
    vocab = byte_level_backend().get_vocab_size()
    make_tiny("llama3", tmp_path, max_shard_size="100KB", vocab_size=vocab, eos_token_id=EOS)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    sharded = LLM(str(tmp_path), tokenizer=str(folder), device="cpu", num_kv_blocks=32)
    assert one(sharded).token_ids == one(llm).token_ids


def test_dummy_weights_need_no_files(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    keywords: dict[str, Any] = {
        "load_format": "dummy",
        "tokenizer": False,
        "device": "cpu",
        "num_kv_blocks": 32,
    }
    runs = [
        one(LLM(str(tmp_path), seed=seed, **keywords), [1, 2, 3]).token_ids for seed in (0, 0, 1)
    ]
    assert runs[0] == runs[1] != runs[2]
    with pytest.raises(ValueError):
        LLM(str(tmp_path), tokenizer=False, device="cpu")


def test_the_shipped_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    llm = LLM(device="cpu", num_kv_blocks=32)
    completion = one(llm, "Once", max_tokens=8)
    assert len(completion.token_ids) == 8 and completion.text


def test_the_tables_of_stop_strings_are_built_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Any] = []

    class Counted(StopStrings):
        def __init__(self, stops: Any) -> None:
            built.append(stops)
            super().__init__(stops)

    monkeypatch.setattr("pdserve.engine.llm.StopStrings", Counted)
    outputs = generate(
        llm, ["The quick", "A", "B"], n=4, stop=["no such text", "nor this"], max_tokens=2, seed=1
    )
    assert len(outputs) == 3 and built == [("no such text", "nor this")]


def test_the_models_own_sampling_values(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They stand for sampling parameters that are not given, as with vLLM, and never for given
    ones."""
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    (model / "generation_config.json").write_text('{"temperature": 0, "max_new_tokens": 7}')
    with caplog.at_level(logging.INFO, "pdserve.engine.llm"):
        llm = LLM(str(model), device="cpu", num_kv_blocks=64)
    assert "from generation_config.json: temperature=0, max_tokens=7" in caplog.text
    defaults = SamplingParams(temperature=0, max_tokens=7)
    assert llm.get_default_sampling_params() == defaults
    [silent] = llm.generate("The quick", use_tqdm=False)
    [said] = llm.generate("The quick", defaults, use_tqdm=False)
    assert silent.outputs == said.outputs and len(silent.outputs[0].token_ids) <= 7
    [hot] = llm.generate("The quick", SamplingParams(ignore_eos=True), use_tqdm=False)
    assert len(hot.outputs[0].token_ids) == 16
    assert LLM(
        str(model), device="cpu", num_kv_blocks=64, generation_config="none"
    ).get_default_sampling_params() == (SamplingParams())


def test_a_bad_parameter_is_named_in_a_sentence_before_the_model_is_looked_for() -> None:
    for given, message in (
        ({"max_model_length": 9}, "unknown key 'max_model_length' in EngineConfig: did you mean"),
        ({"block_size": 24}, "block_size: Input should be 16, 32, 64 or 128"),
        ({"dtype": "float64"}, "dtype: Input should be 'auto', "),
    ):
        with pytest.raises(ValueError, match=message) as refused:
            LLM("no/such/model", **given)
        assert "pydantic" not in str(refused.value) and "\n" not in str(refused.value)
