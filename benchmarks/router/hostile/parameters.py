"""Hostile parameters that are large."""

import json

from benchmarks.router.hostile.sending import (
    COMPLETIONS,
    MB,
    MODEL,
    VOCAB,
    Attack,
    completes,
    completion_body,
    post_of,
    raw_body,
    row,
    sending_all,
)


@row("stops", "64 stops of 1,024 characters, 64 choices of 8 prompts", limit_s=60.0)
def _stops() -> Attack:
    stops = ["a" * 1000 + f"{i:024}" for i in range(64)]
    return completes(prompt=[[5, 6]] * 8, n=64, max_tokens=100, stop=stops)


@row("stops-most", "the most stop strings allowed, 64 choices of 128 prompts", limit_s=60.0)
def _stops_most() -> Attack:
    stops = ["a" * 100 + f"{i:028}" for i in range(64)]
    return completes(prompt=[[5, 6]] * 128, n=64, max_tokens=3, stop=stops)


@row("stops-1", "64 stops of 1,024 characters, 1 choice that runs on", limit_s=15.0)
def _stops_running() -> Attack:
    return completes(
        prompt=[5, 6], max_tokens=500, stop=["e" * 1000 + f"{i:024}" for i in range(64)]
    )


@row("stops-x500", "500 completions of 64 stops of 100 characters at once", limit_s=60.0)
def _stops_together() -> Attack:
    return completes(
        copies=500, prompt=[300, 301], max_tokens=2, stop=["a" * 90 + f"{i:010}" for i in range(64)]
    )


@row("stop-31mb", "a stop string of 31 MB")
def _stop_31mb() -> Attack:
    return completes(prompt=[5, 6], stop="a" * (31 * MB))


@row("stop-surrogates", "a stop of 8 MB of lone surrogates")
def _stop_surrogates() -> Attack:
    return sending_all(
        [
            post_of(
                COMPLETIONS,
                completion_body(prompt=[5, 6], stop=["@"]).replace(b"@", b"\\ud800" * 1_300_000),
            )
        ]
    )


@row("stop-numbers", "stop as a list of 5,000,000 numbers")
def _stop_numbers() -> Attack:
    return raw_body(COMPLETIONS, '{"model":MODEL,"prompt":[5],"stop":[', "1", 5 * MB, "]}")


@row("logit-bias", "logit_bias of 1.3 MB, 64 choices", limit_s=15.0)
def _logit_bias() -> Attack:
    bias = {str(token): -1.2345678 - token / 1e6 for token in range(VOCAB)}
    return completes(prompt=[5, 6], n=64, max_tokens=300, logit_bias=bias)


@row("logit-bias-most", "the most biases allowed, 64 choices of 16 prompts", limit_s=60.0)
def _logit_bias_most() -> Attack:
    bias = {str(token): -1.2345678 - token / 1e6 for token in range(5, 1029)}
    return completes(prompt=[[5, 6]] * 16, n=64, max_tokens=30, logit_bias=bias)


@row("logit-bias-x16", "16 times logit_bias of 1.3 MB, 8 choices each", limit_s=20.0)
def _logit_bias_x16() -> Attack:
    bias = {str(token): -1.2345678 - token / 1e6 for token in range(VOCAB)}
    return completes(copies=16, prompt=[5, 6], n=8, max_tokens=300, logit_bias=bias)


@row("stop-ids-5m", "5,000,000 equal stop_token_ids")
def _stop_ids() -> Attack:
    return raw_body(
        COMPLETIONS,
        '{"model":MODEL,"prompt":[5],"max_tokens":4,"stop_token_ids":[',
        "7",
        5 * MB,
        "]}",
    )


@row("stop-ids-wrong", "5,000,000 stop_token_ids, the last outside the vocabulary")
def _stop_ids_wrong() -> Attack:
    return raw_body(
        COMPLETIONS, '{"model":MODEL,"prompt":[5],"stop_token_ids":[', "7", 5 * MB, ",99999999]}"
    )


@row("key-8mb", "an unknown key of 8 MB")
def _key() -> Attack:
    return completes(prompt=[5, 6], **{"max_tokenz" * (8 * MB // 10): 1})


@row("key-10kb-x2000", "2,000 unknown keys of 10 KB")
def _keys_10kb() -> Attack:
    return completes(prompt=[5, 6], **{f"{i:010}" * 1000: 1 for i in range(2000)})


@row("keys-1m", "an object of 1,000,000 unknown keys")
def _keys() -> Attack:
    return completes(prompt=[5, 6], **{f"k{i}": 1 for i in range(MB)})


@row("model-31mb", "a model's name of 31 MB")
def _model() -> Attack:
    body = completion_body(prompt=[5, 6]).replace(
        json.dumps(MODEL).encode(), b'"' + b"\\u0001" * 5_100_000 + b'"'
    )
    return sending_all([post_of(COMPLETIONS, body)])


@row("salt-31mb", "a cache_salt of 31 MB")
def _salt() -> Attack:
    return completes(prompt=[5, 6], cache_salt="a" * (31 * MB))
