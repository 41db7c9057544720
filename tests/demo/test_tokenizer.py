"""The shipped tokenizer: loses nothing, matches its script, and its chat template is what the model
was trained on."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import pdserve.text.tokenizer
from demo.data import ASSISTANT, BOS, END, EOS, chat_text
from demo.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, save_tokenizer, token_id, train_tokenizer

SHIPPED = Path(__file__).parents[2] / "demo" / "pdserve-demo"
RAW = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))


@pytest.fixture(scope="module")
def auto() -> Any:
    return AutoTokenizer.from_pretrained(SHIPPED)


@given(st.text())
def test_any_text_survives_a_round_trip(text: str) -> None:
    assert (
        RAW.decode(RAW.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        == text
    )


@pytest.mark.parametrize(
    "text", ["", "héllo wörld", "日本語 🎉🎉", "a\tb\r\n\n  c", "½ ١٢ \x00", "مرحبا"]
)
def test_difficult_text_survives_a_round_trip(text: str, auto: Any) -> None:
    assert RAW.decode(RAW.encode(text).ids) == text
    assert auto.decode(auto.encode(text), skip_special_tokens=True) == text


def test_both_loaders_agree_and_put_bos_in_front(auto: Any) -> None:
    ids = RAW.encode("The code of Mira is 4729.").ids
    assert auto.encode("The code of Mira is 4729.") == ids
    assert ids[0] == auto.bos_token_id == token_id(RAW, BOS) and ids.count(ids[0]) == 1


def test_digits_are_tokens_of_their_own() -> None:
    assert RAW.encode("4729+3", add_special_tokens=False).tokens == ["4", "7", "2", "9", "+", "3"]


def test_special_tokens_come_first_and_are_one_token(auto: Any) -> None:
    assert [token_id(RAW, token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert RAW.get_vocab_size() == VOCAB_SIZE
    assert set(auto.all_special_tokens) == set(SPECIAL_TOKENS)
    assert auto.decode(RAW.encode(f"hello{END}{EOS}").ids, skip_special_tokens=True) == "hello"


def test_token_id_refuses_an_unknown_token() -> None:
    with pytest.raises(ValueError, match="not one token"):
        token_id(RAW, "no such token")


def test_chat_template_renders_the_training_format(auto: Any) -> None:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi.\n"},
    ]
    trained_on = BOS + chat_text([("Hello!", "Hi.\n")], with_system=True)
    assert auto.apply_chat_template(messages, tokenize=False) == trained_on
    prompt = auto.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert prompt == trained_on.removesuffix(f"Hi.\n{END}") and prompt.endswith(ASSISTANT)


def test_chat_ids_hold_one_bos_and_decode_back(auto: Any) -> None:
    messages = [{"role": "user", "content": "Größe <3?"}]
    ids = auto.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    assert ids.count(auto.bos_token_id) == 1
    assert auto.decode(ids) == auto.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


def test_the_server_tokenizer_ends_turns_where_the_model_does() -> None:
    served = pdserve.text.tokenizer.Tokenizer.load(SHIPPED)
    assert set(served.eos_token_ids) == {token_id(RAW, EOS), token_id(RAW, END)}


@pytest.mark.slow
@pytest.mark.lengthy
def test_the_script_makes_the_shipped_files(tmp_path: Path) -> None:
    save_tokenizer(train_tokenizer(), tmp_path)
    for made in tmp_path.iterdir():
        if made.name != "tokenizer.json":
            assert made.read_text() == (SHIPPED / made.name).read_text()
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab() == RAW.get_vocab()
