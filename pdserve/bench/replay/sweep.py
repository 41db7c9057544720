"""Replays windows of one trace at one rate after another; windows that the file already has are not
sent again.

Knows no options, and prints nothing but progress. Called by commands.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.record import circumstances
from pdserve.bench.replay.figures import Promises, Run, Settings, WindowResult, judgement
from pdserve.bench.replay.send import Target, prepare, replay_window
from pdserve.bench.replay.store import Store
from pdserve.bench.replay.trace import Trace
from pdserve.bench.replay.window import Caps, Pace, Span, Window, take_window

MOST_SECONDS = 31 * 86400  # of a window; a longer one is meant to be something else


@dataclass(frozen=True)
class Sweep:
    """Everything that is replayed."""

    trace: Trace
    span: Span
    paces: Sequence[Pace]  # One window each.
    caps: Caps
    target: Target
    promises: Promises
    label: str  # What is measured; the name of its curve.
    salt: str = ""  # Part of every window's name. Another salt gives other tokens.
    num_warmups: int = 1  # Requests before the first window.
    commit: str | None = None  # For folders where git cannot tell it.

    def settings(self, pace: Pace) -> Settings:
        """Returns what one window of this sweep is known by."""
        return Settings(
            label=self.label,
            trace=self.trace.name,
            digest=self.trace.digest,
            window=str(self.span),
            rate=pace.rate,
            speed=pace.speed,
            duration_s=pace.duration_s,
            max_input=self.caps.max_input,
            max_output=self.caps.max_output,
            seed=self.target.seed,
            salt=self.salt,
            vocab_size=self.target.vocab_size,
            clients=self.target.clients,
            model=self.target.model,
        )

    def windows(self) -> list[Window]:
        """Returns one window for each pace. Raises ValueError if an option leaves nothing to
        send, or if a window lasts for more than MOST_SECONDS."""
        windows = []
        for pace in self.paces:
            window = take_window(self.trace, self.span, pace, self.caps)
            if window.seconds > MOST_SECONDS:
                raise ValueError(
                    f"--window {self.span} at {pace} lasts for {window.seconds / 86400:,.3g} days, "
                    f"more than {MOST_SECONDS // 86400}: take a higher rate or speed, a shorter "
                    "--window, or a --duration"
                )
            windows.append(window)
        return windows


def run_sweep(sweep: Sweep, store: Store, progress: bool = True) -> list[Run]:
    """Returns a run for each pace, replayed now or found in the store, judged by the sweep's
    promises.

    Raises ValueError before anything is sent if an option leaves nothing to send. Raises
    ServerError (a ValueError) if the server does not answer a warm-up.
    """
    windows = sweep.windows()
    model: str | None = None
    runs: list[Run] = []
    for pace, window in zip(sweep.paces, windows, strict=True):
        run = store.find(sweep.settings(pace))
        if run is None:
            if model is None:
                longest = max(windows, key=lambda window: len(window.requests))
                model = prepare(sweep.target, longest, sweep.num_warmups, sweep.salt)
            run = _replay(sweep, store, pace, window, model, progress)
        runs.append(run.judged(sweep.promises))
    return runs


def _replay(
    sweep: Sweep, store: Store, pace: Pace, window: Window, model: str, progress: bool
) -> Run:
    settings = sweep.settings(pace)
    num_begun = store.begin(settings)
    name = settings.window_name(num_begun)
    records, figures = replay_window(sweep.target, model, window, name, str(pace), progress)
    result = WindowResult(
        settings=settings,
        promises=sweep.promises,
        num_begun=num_begun,
        model=model,
        circumstances=circumstances(sweep.commit),
        **judgement(records, sweep.promises, window.seconds),
        **figures,
    )
    run = Run(result, records)
    store.add(run)
    return run
