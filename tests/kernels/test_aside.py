"""Tests work on a second stream: in which order streams wait for each other, and how long the
tensors that the work reads are kept. The streams are fakes."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from pdserve.kernels.launching.aside import Aside


class Event:
    def __init__(self) -> None:
        self.after: list[str] = []

    def record(self, stream: "Stream") -> None:
        self.after = list(stream.before)


class Stream:
    """A fake stream. before: all work that comes before what the stream is given next."""

    def __init__(self, *_: object, **__: object) -> None:
        self.before: list[str] = []

    def wait_event(self, event: Event) -> None:
        self.before += [work for work in event.after if work not in self.before]


class Streams:
    def __init__(self) -> None:
        self.main = self.current = Stream()

    @contextmanager
    def entered(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def give(self, work: str) -> None:
        self.current.before.append(work)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", made.entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.current)
    return made


def test_each_stream_waits_for_what_it_needs_alone(streams: Streams) -> None:
    aside = Aside(torch.device("cuda"), 2)
    seen = []

    def send(name: str) -> None:
        seen.append((name, list(streams.current.before)))
        streams.give(name)

    for number in range(2):
        streams.give(f"make {number}")
        aside.do(number, partial(send, f"send {number}"), torch.zeros(1))
    assert seen == [
        ("send 0", ["make 0"]),
        ("send 1", ["make 0", "send 0", "make 1"]),
    ]
    assert streams.main.before == ["make 0", "make 1"], "it waits for nothing yet"
    aside.join(0)
    assert streams.main.before == ["make 0", "make 1", "send 0"]
    aside.join(1)
    assert "send 1" in streams.main.before


def test_what_is_read_is_kept_until_it_is_joined(streams: Streams) -> None:
    """Also when that work failed, or nobody ever joined it and its number comes again."""
    aside = Aside(torch.device("cuda"), 1)

    def fail() -> None:
        streams.give("send")
        raise ValueError("it fails")

    reads = torch.zeros(1)
    kept = weakref.ref(reads)
    with pytest.raises(ValueError, match="it fails"):
        aside.do(0, fail, reads)
    del reads
    assert kept() is not None and streams.main.before == []
    aside.do(0, lambda: None, torch.zeros(1))
    assert kept() is None and streams.main.before == ["send"]


def test_on_a_cpu_it_is_done_at_once() -> None:
    done = []
    aside = Aside(torch.device("cpu"), 1)
    aside.do(0, lambda: done.append(1), torch.zeros(1))
    aside.join(0)
    assert done == [1]
