"""A text as a sequence of symbols (characters or tokens), and a reward for each symbol: the
data of the character laboratory.

The last tenth of the text is held out. A sampled symbol is compared with the text's symbol at
the same position, so there are no problems and no `score`. `Bigram` is the reference policy:
add-one smoothed bigram counts of the text.
Shapes: W windows, T positions of a window."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from codechat.core.errors import DataError
from codechat.data import sources
from codechat.text import tokenizer
from codechat.text.tokenizer import Tokenizer

# The hub keeps a parquet copy of data sets that ship only a loading script, on a branch of its
# own. "train" is nine tenths of the plays.
HUB = ("karpathy/tiny_shakespeare@refs/convert/parquet", "default/train/*.parquet")
HELD_OUT = 0.1


@dataclass(frozen=True)
class Text:
    """A text in symbols. train, val: (N,) int64 ids. val: the end of the text, held out."""

    tokenizer: Tokenizer
    train: Tensor
    val: Tensor

    def draw_windows(self, count: int, length: int, rng: torch.Generator) -> Tensor:
        """(W, length) ids of uniformly random windows of the training part."""
        starts = torch.randint(_starts(self.train, length), (count,), generator=rng)
        return self.train[starts[:, None] + torch.arange(length)]

    def val_windows(self, length: int, step: int, limit: int) -> Tensor:
        """(W, length) ids: windows of the held-out part at a stride of `step` symbols, at most
        `limit`, at least one."""
        _starts(self.val, length)
        return self.val.unfold(0, length, step)[: max(1, limit)]

    def hash(self) -> str:
        return sources.hash_rows(ids.numpy().tobytes() for ids in (self.train, self.val))

    def symbol_bytes(self) -> Tensor:
        """(n_vocab,) bytes of text of each id."""
        lengths = [len(self.tokenizer.token_bytes(i)) for i in range(self.tokenizer.n_vocab)]
        lengths[self.tokenizer.eot_id] = 0
        return torch.tensor(lengths)


def _starts(ids: Tensor, length: int) -> int:
    if len(ids) < length:
        raise DataError(
            f"a part of the text has {len(ids)} symbols; a window needs {length}; lower --horizon"
        )
    return len(ids) - length + 1


def load(source: str, symbols: str | Tokenizer) -> Text:
    """The text of `source` (embedded, hub, or a file), split at a line break before its last tenth.

    symbols: "chars" for the text's own characters, a tokenizer's name (gpt2:1024, bytes, ...),
    or a tokenizer. Raises UserError."""
    text = read_text(source)
    cut = text.rfind("\n", 0, int(len(text) * (1 - HELD_OUT))) + 1
    if not cut:
        raise DataError(
            f"the text of {source} has {len(text)} characters and no line break to split at"
        )
    if symbols == "chars":
        symbols = tokenizer.from_dict({"spec": "chars", "alphabet": "".join(sorted(set(text)))})
    tok = tokenizer.load(symbols) if isinstance(symbols, str) else symbols
    train, val = (
        torch.from_numpy(a.astype("int64")) for a in tok.encode_arrays([text[:cut], text[cut:]])
    )
    return Text(tok, train, val)


def read_text(source: str) -> str:
    """embedded: the help topics of the running Python (0.5 MB, different in each version). hub:
    tiny-Shakespeare. Else the path of a UTF-8 file, or of parquet or jsonl files with a column
    `text`."""
    if source == "embedded":
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))
    path = Path(source)
    if source != "hub" and not path.is_dir() and not sources.row_format(path):
        return "".join(sources.open_text(path))
    rows = sources.hub_rows(HUB[0], files=HUB[1]) if source == "hub" else sources.local_rows(path)
    return "\n\n".join(row["text"] for row in sources.require_columns(rows, [("text",)], source))


def dense_rewards(
    drawn: Tensor,
    truth: Tensor,
    *,
    wrong: float = 0.0,
    partial: float = 0.0,
    credit: Tensor | None = None,
) -> Tensor:
    """Per-token rewards, float32: 1 where the sampled symbol equals the text's, else `wrong`,
    plus `partial` x credit.

    credit: log-probabilities in nats, broadcast to the shape of `drawn`."""
    reward = torch.where(drawn == truth, 1.0, wrong)
    return reward + partial * credit if partial and credit is not None else reward


def annealed(kl_coef: float, tokens: int, warmup_tokens: int) -> float:
    """The KL coefficient after `tokens`: linear from 0 to kl_coef at `warmup_tokens`, then
    constant. 0 warm-up
    tokens: constant from the start."""
    return kl_coef if tokens >= warmup_tokens else kl_coef * tokens / warmup_tokens


class Bigram:
    """P(next | previous) = (count of the pair + 1) / (count of the previous + V) over V symbols
    of a text. Not trained.

    Stores the pairs that occur, not a V x V table, so a vocabulary of 50,257 fits too."""

    def __init__(self, ids: Tensor, n_symbols: int) -> None:
        self.n_symbols = n_symbols
        # sorted
        self.pairs, self.counts = (ids[:-1] * n_symbols + ids[1:]).unique(return_counts=True)
        self.before = ids[:-1].bincount(minlength=n_symbols)

    def logprobs(self, previous: Tensor, following: Tensor) -> Tensor:
        """Log-probability of each following symbol given its previous one, nats, float32. Both
        have the same shape."""
        pair = previous * self.n_symbols + following
        at = torch.searchsorted(self.pairs, pair).clamp(max=len(self.pairs) - 1)
        count = torch.where(self.pairs[at] == pair, self.counts[at], 0)
        return (
            (count + 1).double().log() - (self.before[previous] + self.n_symbols).double().log()
        ).float()

    def to(self, device: torch.device) -> Bigram:
        self.pairs, self.counts, self.before = (
            x.to(device) for x in (self.pairs, self.counts, self.before)
        )
        return self
