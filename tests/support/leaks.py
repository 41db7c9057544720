"""Checks what a process must not gather over time: memory, file descriptors, threads, asyncio
tasks. Used by the soak.
"""

import contextlib
import statistics
import time
from dataclasses import dataclass, field

import psutil

# of the last quarter's median over the first's: allocators settle for a while
MAX_GROWTH_MIB = 16.0
# than at the first rest; a leak a death or a request makes hundreds
MORE_FDS = 40
MORE_THREADS = 12
MORE_TASKS = 12


@dataclass(frozen=True)
class Holdings:
    """Things that a process holds; `tasks` is None if nobody can ask for them."""

    num_fds: int
    num_threads: int
    tasks: int | None = None

    def exceeds(self, first: "Holdings") -> str:
        """Says what is too much compared with another rest; "" if nothing is."""
        fds = self.num_fds - first.num_fds
        threads = self.num_threads - first.num_threads
        tasks = (self.tasks or 0) - (first.tasks or 0)
        grown = {
            "fds": (fds, MORE_FDS),
            "threads": (threads, MORE_THREADS),
            "tasks": (tasks, MORE_TASKS),
        }
        return ", ".join(
            f"{more} more {name}" for name, (more, limit) in grown.items() if more > limit
        )


def holdings(pid: int, tasks: int | None = None) -> Holdings:
    process = psutil.Process(pid)
    return Holdings(process.num_fds(), process.num_threads(), tasks)


def private_mib(pid: int) -> float:
    """Memory that is its own: what several processes map (the KV cache) is left out."""
    memory = psutil.Process(pid).memory_info()
    return (memory.rss - memory.shared) / (1 << 20)


@dataclass
class MemoryWatch:
    """Samples of processes that live on, by name."""

    seen: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def sample(self, pids: dict[str, int]) -> None:
        now = time.monotonic()
        for name, pid in pids.items():
            with contextlib.suppress(psutil.NoSuchProcess):  # its successor is not there yet
                self.seen.setdefault(name, []).append((now, private_mib(pid)))

    def growth_mib(self, name: str) -> float:
        """From the first quarter of its samples to the last."""
        sizes = [size for _, size in self.seen[name]]
        quarter = max(1, len(sizes) // 4)
        return statistics.median(sizes[-quarter:]) - statistics.median(sizes[:quarter])

    def slope_mib_per_hour(self, name: str) -> float:
        times, sizes = zip(*self.seen[name], strict=True)
        return 3600 * statistics.linear_regression(times, sizes).slope

    def table(self) -> str:
        lines = ["| process | MiB, first | last | slope, MiB/hour |", "|---|---|---|---|"]
        for name, samples in self.seen.items():
            slope = self.slope_mib_per_hour(name) if len(samples) > 1 else 0.0
            lines.append(f"| {name} | {samples[0][1]:.1f} | {samples[-1][1]:.1f} | {slope:+.1f} |")
        return "\n".join(lines)

    def check(self) -> None:
        for name in self.seen:
            growth = self.growth_mib(name)
            assert growth <= MAX_GROWTH_MIB, f"{name} grew by {growth:.1f} MiB\n{self.table()}"
