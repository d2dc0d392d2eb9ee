"""What a token of packed rows may attend to. Shapes: B rows, T tokens."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Documents:
    """A token attends to earlier tokens of its document and, with branches, of these to branch
    0 and its own branch.

    docs, branches: (B, T) numbers; a document below 0 is padding."""

    docs: Tensor
    branches: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """The same as bool (B, 1, T, T), true = attend. Padding attends to itself: a softmax
        without keys is NaN."""
        return self.sees(0, self.docs.shape[1])[:, None]

    def sees(self, at: int, end: int) -> Tensor:
        """Whether tokens [at, end) attend to those before `end`: (B, end - at, end)."""
        q = self.docs[:, at:end, None]
        k = self.docs[:, None, :end]
        same = (q == k) & (q >= 0)
        if self.branches is not None:
            own = self.branches[:, at:end, None]
            other = self.branches[:, None, :end]
            same &= (other == 0) | (other == own)
        back = torch.arange(at, end, device=q.device)[:, None] - torch.arange(end, device=q.device)
        return (same & (back >= 0)) | (back == 0)


if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    # of `attention.attend`; a tensor is bool (B, 1, T, T), true = attend
    Mask = Tensor | Documents | BlockMask
