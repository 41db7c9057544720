"""The generators: a seed names its text, questions have one answer, sums and JSON are right."""

import json
import random
import re
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from demo.data import (
    EOS,
    arithmetic,
    chat,
    json_extraction,
    recall_document,
    recall_prompt,
    story,
)
from demo.documents import SKILLS_SHARE, document
from demo.recall import MAX_PROMPT_TOKENS, length_bucket, recall_prompts, shares

QUESTION = re.compile(r"\nQuestion: (.*)\nAnswer:( .*?\.)(?=<\|eos\|>)")
STATEMENT_OF = (
    (re.compile(r"What is the (code|password) of (.*)\?"), "The {0} of {1} is{2}"),
    (re.compile(r"Where does (.*) live\?"), "{0} lives in{1}"),
    (re.compile(r"What does the (.*) hold\?"), "The {0} holds{1}"),
)


def statement(question: str, answer: str) -> str:
    """The sentence that states the answer to this question."""
    for pattern, template in STATEMENT_OF:
        if match := pattern.fullmatch(question):
            return template.format(*match.groups(), answer)
    raise AssertionError(f"unknown question {question!r}")


@pytest.mark.parametrize(
    "make", [story, arithmetic, json_extraction, chat, lambda rng: document(rng, 300, 0.5)]
)
def test_a_seed_names_its_text(make: Callable[[random.Random], str]) -> None:
    assert make(random.Random(7)) == make(random.Random(7))
    assert len({make(random.Random(seed)) for seed in range(20)}) == 20


def test_recall_prompts_are_named_by_their_seed() -> None:
    assert recall_prompts(3, 5) == recall_prompts(3, 5)
    assert set(recall_prompts(3, 5)).isdisjoint(recall_prompts(4, 5))


def test_each_answer_is_stated_once_and_its_key_has_no_other_value() -> None:
    for prompt, answer, _ in recall_prompts(1, 100):
        text, question = prompt.removesuffix("\nAnswer:").split("\nQuestion: ")
        sentence = statement(question, answer)
        assert text.count(sentence) == 1
        assert text.count(answer.strip(" .")) == 1
        assert text.count(sentence.removesuffix(answer) + " ") == 1


def test_documents_answer_from_what_stands_before_the_question() -> None:
    num_questions = 0
    for seed in range(20):
        text = recall_document(random.Random(seed), 1500)
        for found in QUESTION.finditer(text):
            assert text[: found.start()].count(statement(*found.groups())) == 1
            num_questions += 1
        assert text.count("\nAnswer:") == text.count(EOS)
    assert num_questions > 100


def test_asked_facts_stand_anywhere_among_distractors() -> None:
    places = []
    num_facts = []
    for prompt, answer, _ in recall_prompts(2, 200):
        places.append(prompt.index(answer) / len(prompt))
        num_facts.append(
            len(re.findall(r" (?:of .*? is|lives in|holds) ", prompt.split("\nQuestion")[0]))
        )
    assert min(places) < 0.1 and max(places) > 0.85
    assert 0.4 < sum(places) / len(places) < 0.6
    assert sum(num_facts) / len(num_facts) > 8


def test_prompt_lengths_are_spread_up_to_the_limit(tokenizer: Tokenizer) -> None:
    lengths = [len(tokenizer.encode(p.prompt).ids) for p in recall_prompts(0, 300)]
    assert max(lengths) <= MAX_PROMPT_TOKENS
    assert {length_bucket(n) for n in lengths} == {
        length_bucket(n) for n in range(0, MAX_PROMPT_TOKENS, 250)
    }


def test_a_lower_limit_holds_too(tokenizer: Tokenizer) -> None:
    assert max(len(tokenizer.encode(p.prompt).ids) for p in recall_prompts(0, 100, 300)) <= 300


@pytest.mark.parametrize("limit", [50, 1501])
def test_a_limit_outside_the_trained_range_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match="max_tokens is"):
        recall_prompts(0, 1, limit)


def test_a_prompt_too_short_for_a_fact_is_refused() -> None:
    with pytest.raises(ValueError, match="num_tokens is 30"):
        recall_prompt(random.Random(0), 30)


def test_sums_are_right() -> None:
    for seed in range(50):
        for line in arithmetic(random.Random(seed)).splitlines():
            a, sign, b, _, result = line.split()
            assert int(result) == (int(a) + int(b) if sign == "+" else int(a) - int(b)) >= 0


def test_extracted_json_repeats_the_sentence() -> None:
    for seed in range(50):
        text, extracted = json_extraction(random.Random(seed)).split("\nJSON: ")
        values = json.loads(extracted).values()
        assert len(values) == 4 and all(str(value) in text for value in values)


def test_the_mix_holds_every_kind_of_document() -> None:
    texts = [document(random.Random(seed), 900, 0.75) for seed in range(300)]
    share = sum("<tools>" in text or "schema" in text for text in texts) / len(texts)
    assert 0.7 * SKILLS_SHARE < share < 1.2 * SKILLS_SHARE
    recall = sum(text.count(f"{EOS}\nQuestion: ") > 3 for text in texts) / len(texts)
    assert 0.35 < recall < 0.75 * (1 - SKILLS_SHARE) + 0.1
    for mark in ("<tool_call>", "<tool_response>", "<think>", "Keys: ", "Once upon a time"):
        assert any(mark in text for text in texts), mark


def test_shares_counts_by_key() -> None:
    assert shares(["b", "a", "b"], [True, False, False]) == "a 0.000 (1)  b 0.500 (2)"
