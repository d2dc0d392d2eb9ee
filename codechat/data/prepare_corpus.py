"""`codechat data corpus`: source text -> shards of token ids for pretraining."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from codechat.core.config import opt
from codechat.core.errors import ConfigError
from codechat.data import corpus, public_rows, sources
from codechat.data.prepared import check_shares, print_ledgers, reasons, require_kind
from codechat.data.sources import Document, Ledger
from codechat.text import tokenizer

CORPUS_HUB = ("codeparrot/github-code-clean", "data/train-*.parquet", ["code", "path", "language"])


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Source text -> shards of token ids."""

    source: str = opt("embedded", "embedded, hub, or a path: parquet, jsonl, .py, .txt, a directory of them")
    out: str = opt("data/corpus", "directory to write")
    tokenizer: str = opt("gpt2", "gpt2, gpt2:N, python:N, chars:FILE or bytes")
    max_examples: int | None = opt(None, "documents to read; none = all", least=0)
    max_tokens: int | None = opt(None, "stop after this many tokens; none = no limit", least=1)
    val_share: float = opt(corpus.VAL_SHARE, "share of the documents held out for validation, by hash")
    max_lost: float = opt(sources.LARGEST_LOSS, "largest share of a source that may be lost for one reason")

    def __post_init__(self) -> None:
        check_shares(self, "max_lost")
        if not 0 <= self.val_share < 1:  # training needs a part
            required = "it must be a share from 0 on and below 1"
            raise ConfigError(f"val_share is {self.val_share}; {required}; correct --val-share")


def prepare_corpus(cfg: CorpusConfig) -> dict[str, Any]:
    """Write the corpus; returns its manifest. Raises UserError."""
    out = Path(cfg.out)
    require_kind(out, "corpus")
    name = cfg.source if cfg.source in ("embedded", "hub") else Path(cfg.source).name
    ledger = Ledger(name, reasons(public_rows.DOCUMENT_REASONS, cfg))
    texts, tok = islice(_documents(cfg, ledger), cfg.max_examples), tokenizer.load(cfg.tokenizer)
    try:
        with tqdm(total=cfg.max_tokens, desc="corpus", unit="tok", unit_scale=True) as bar:
            how: Any = {"max_tokens": cfg.max_tokens, "progress": bar.update}
            return corpus.write_corpus(texts, out, tok, ledger=ledger, val_share=cfg.val_share, **how)
    finally:
        print_ledgers([ledger])


def _documents(cfg: CorpusConfig, ledger: Ledger) -> Iterator[Document]:
    if cfg.source == "embedded":
        return sources.embedded_python(ledger)
    if cfg.source == "hub":
        name, files, columns = CORPUS_HUB
        return public_rows.row_documents(sources.hub_rows(name, files=files, columns=columns), name, ledger)
    return public_rows.path_documents(Path(cfg.source), ledger)
