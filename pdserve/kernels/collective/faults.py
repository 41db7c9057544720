"""The words in which a rank's kernels and its host tell each other that another rank did not
answer. All that waits for others on the rank's device shares them. Knows no regions.
"""

import torch
from torch import Tensor


class Faults:
    """Two words, 0 while all answer: `device`, int32 `[1]`, and `host`, the same in memory that
    device and host see."""

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self.host = host
        self.device = torch.zeros(1, dtype=torch.int32, device=device)

    @classmethod
    def on(cls, device: torch.device) -> "Faults":
        """The faults of a rank with this GPU."""
        return cls(torch.zeros(1, dtype=torch.int32, pin_memory=True), device)

    def call_off(self) -> None:
        """End what waits on the device. From any thread."""
        self.host.fill_(1)

    def check(self) -> None:
        """RuntimeError when a rank was not heard of in time; to be asked before results are
        used."""
        if int(self.host[0]):
            raise RuntimeError(
                "a rank of this engine did not answer in time: what was computed is not valid"
            )
