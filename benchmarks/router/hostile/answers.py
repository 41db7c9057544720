"""Hostile requests whose answers are large, or are not read."""

from benchmarks.router.hostile.sending import (
    COMPLETIONS,
    LONGEST,
    Attack,
    completes,
    completion_body,
    head_of,
    ids_of,
    post_of,
    row,
    sending_all,
)


@row("echo-n64", "64 choices that echo a prompt of 128k tokens, streamed", limit_s=60.0)
def _echo() -> Attack:
    return completes(prompt=ids_of(LONGEST), n=64, echo=True, stream=True, max_tokens=4)


@row("token-ids-n64", "64 choices that return the 128k ids of their prompt, streamed", limit_s=60.0)
def _token_ids() -> Attack:
    return completes(prompt=ids_of(LONGEST), n=64, return_token_ids=True, stream=True, max_tokens=4)


@row("token-ids-unread", "the same, read by nobody", "open", 20.0)
def _token_ids_unread() -> Attack:
    body = completion_body(
        prompt=ids_of(LONGEST), n=64, return_token_ids=True, stream=True, max_tokens=4
    )
    return sending_all([post_of(COMPLETIONS, body)], reads=False)


@row("echo-2000", "2,000 prompts of 1,000 ids, echoed", limit_s=60.0)
def _echoes() -> Attack:
    return completes(prompt=[ids_of(1000)] * 2000, echo=True, max_tokens=1)


@row(
    "whole-unread",
    "6 times the scores of 64 prompts of 390 ids, not streamed, read by nobody",
    "open",
    20.0,
)
def _whole_unread() -> Attack:
    body = completion_body(prompt=[ids_of(390)] * 64, prompt_logprobs=20, max_tokens=1)
    return sending_all([post_of(COMPLETIONS, body)] * 6, reads=False)


@row(
    "whole-echo-unread",
    "12 times 64 choices that echo 390 scored ids, not streamed, read by nobody",
    "open",
    20.0,
)
def _whole_echo_unread() -> Attack:
    body = completion_body(prompt=ids_of(390), n=64, echo=True, logprobs=20, max_tokens=1)
    return sending_all([post_of(COMPLETIONS, body)] * 12, reads=False)


@row("logprobs-n64", "echo with logprobs 20 of 4,000 tokens, 64 choices", limit_s=60.0)
def _logprobs() -> Attack:
    return completes(prompt=ids_of(4000), n=64, echo=True, logprobs=20, max_tokens=16)


@row("prompt-logprobs", "prompt_logprobs 20 of the longest prompt", limit_s=60.0)
def _prompt_logprobs() -> Attack:
    return completes(prompt=ids_of(LONGEST), prompt_logprobs=20, max_tokens=1)


@row(
    "prompt-logprobs-most",
    "prompt_logprobs 20 of 24,900 tokens, the most that are answered",
    "answered",
    60.0,
)
def _prompt_logprobs_most() -> Attack:
    return completes(prompt=ids_of(24_900), prompt_logprobs=20, max_tokens=1)


@row("prompt-logprobs-n64", "prompt_logprobs 20 of 16,000 tokens, 64 choices", limit_s=60.0)
def _prompt_logprobs_n64() -> Attack:
    return completes(prompt=ids_of(16_000), n=64, prompt_logprobs=20, max_tokens=1)


@row("logprobs-long", "logprobs 20 of 64 choices x 300 tokens, not streamed", limit_s=60.0)
def _logprobs_long() -> Attack:
    return completes(prompt=[5, 6], n=64, logprobs=20, max_tokens=300)


@row(
    "unread-plain",
    "8 streams of 64 choices, read by nobody: 25,600 tokens/s for 30 s",
    wanted="open",
)
def _unread() -> Attack:
    body = completion_body(prompt=[5, 6], n=64, max_tokens=100_000, stream=True, ignore_eos=True)
    return sending_all([post_of(COMPLETIONS, body)] * 8, reads=False)


@row(
    "unread-logprobs",
    "4 streams of 64 choices with logprobs 20, read by nobody for 15 s",
    "open",
    15.0,
)
def _unread_logprobs() -> Attack:
    body = completion_body(
        prompt=[5, 6], n=64, max_tokens=100_000, stream=True, ignore_eos=True, logprobs=20
    )
    return sending_all([post_of(COMPLETIONS, body)] * 4, reads=False)


@row("read-late", "8 streams of 64 choices, read after 10 s, all at once", "open", 30.0)
def _read_late() -> Attack:
    body = completion_body(prompt=[5, 6], n=64, max_tokens=2000, stream=True, ignore_eos=True)
    return sending_all([post_of(COMPLETIONS, body)] * 8, reads_after_s=10.0)


@row("scrapes-300", "300 scrapes of /metrics at once", wanted="answered")
def _scrapes() -> Attack:
    return sending_all([[head_of("/metrics", 0, method="GET")]] * 300)


@row("openapi-300", "300 times /openapi.json at once", wanted="answered")
def _openapi() -> Attack:
    return sending_all([[head_of("/openapi.json", 0, method="GET")]] * 300)
