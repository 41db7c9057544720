"""Turns a Submit into a Request, or says what is wrong with it. Everything is checked before
anything is computed.

Knows the model's vocabulary and the engine's limits; no queue and no blocks. Called by the engine.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.engine.grammars.grammar import Grammar
from pdserve.engine.scheduling.sequence import Request
from pdserve.protocol.block_digests import Tenant
from pdserve.protocol.commands import Submit


@dataclass(frozen=True)
class RequestChecker:
    """Checks requests against one engine. max_request_tokens: maximum tokens of prompt and output,
    by the model's length and the KV cache's size. clock: the engine's."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_request_tokens: int
    max_num_seqs: int
    clock: Callable[[], float] = time.monotonic

    def request(self, submit: Submit, grammar: Grammar | None = None) -> Request:
        """Make the request. ValueError names the parameter if it can never run here. grammar: built
        from the request's sampling, if it asks for one."""
        prompt = submit.prompt_token_ids
        sampling = submit.sampling
        self._check_prompt(prompt, 0 if submit.kind == "embed" else 1)
        self._check_kind(submit)
        sampling.check_vocab(self.vocab_size)
        self._check_starts(submit)
        stops = frozenset(sampling.stop_token_ids)
        now = self.clock()
        request = Request(
            key=submit.key,
            prompt_token_ids=prompt,
            sampling=sampling,
            max_tokens=self._max_tokens(submit),
            stop_token_ids=stops if sampling.ignore_eos else stops | frozenset(self.eos_token_ids),
            kind=submit.kind,
            prefill_only=submit.phase == "prefill",
            overlap=submit.overlap,
            priority=submit.priority,
            tenant=Tenant(submit.cache_salt, submit.adapter),
            parts=submit.parts,
            submitted_at=now,
            called_at=now - submit.waited_ms / 1e3,
            prefix=submit.prefix,
            grammar=grammar,
        )
        for start in submit.starts:
            if len(start.forced) >= request.max_tokens and submit.kind != "embed":
                raise ValueError(
                    f"choice {start.choice} has {len(start.forced)} forced tokens of at most "
                    f"{request.max_tokens}: nothing is left to do"
                )
        return request

    def _max_tokens(self, submit: Submit) -> int:
        """The number of tokens that are asked for, limited to what fits here. At a prefill worker
        there is no limit: the worker that continues knows how many tokens fit after the first.
        """
        asked = submit.sampling.max_tokens or sys.maxsize
        if submit.phase == "prefill":
            return asked
        room = self.max_request_tokens - len(submit.prompt_token_ids)
        if submit.sampling.min_tokens > room:
            raise ValueError(
                f"min_tokens is {submit.sampling.min_tokens}, but only {room} fit after this "
                "prompt: lower it, or shorten the prompt"
            )
        return min(asked, room)

    def _check_prompt(self, prompt: tuple[int, ...], num_answer: int) -> None:
        """Check tokens and length. num_answer: number of answer tokens that must fit after the
        prompt."""
        if not prompt:
            raise ValueError("prompt must hold at least one token")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise ValueError(f"prompt holds a token id outside 0..{self.vocab_size - 1}")
        if len(prompt) + num_answer > self.max_request_tokens:
            raise ValueError(
                f"prompt has {len(prompt)} tokens, but a request may have "
                f"{self.max_request_tokens} in all "
                "(max_model_len, or what the KV cache holds): shorten it"
            )

    def _check_kind(self, submit: Submit) -> None:
        if submit.adapter:
            raise ValueError(f"adapter {submit.adapter!r} is not served here: leave it out")
        if submit.parts:
            raise ValueError("parts: the model takes only token ids; leave them out")
        if submit.kind != "embed":
            return
        alone = len(submit.starts) == 1 and not submit.starts[0].forced
        if submit.phase != "full" or not alone or submit.ticket is not None:
            raise ValueError('kind "embed" takes phase "full" and one start without forced tokens')
        if submit.sampling.prompt_logprobs is not None:
            raise ValueError('prompt_logprobs must be None with kind "embed"')

    def _check_starts(self, submit: Submit) -> None:
        choices = [start.choice for start in submit.starts]
        if not choices or len(set(choices)) != len(choices):
            raise ValueError("starts must name at least one choice, each once")
        if len(choices) > self.max_num_seqs:
            raise ValueError(
                f"n is {len(choices)}, but a step runs at most {self.max_num_seqs} sequences"
            )
        if submit.phase == "prefill" and any(start.forced for start in submit.starts):
            raise ValueError('phase "prefill" takes no forced tokens: use "full" or "decode"')
        if submit.ticket is not None and not all(start.forced for start in submit.starts):
            raise ValueError(
                "starts with a ticket need forced tokens, because the prompt's last logits are not "
                "handed over"
            )
        if any(
            not 0 <= token < self.vocab_size for start in submit.starts for token in start.forced
        ):
            raise ValueError(f"starts hold a forced token id outside 0..{self.vocab_size - 1}")
