"""`codechat data KIND`: prepare training data: a corpus, conversations, function calls and
their problems.

    codechat data corpus --source embedded --tokenizer gpt2:4096 --max-tokens 8e6 --out data/corpus
    codechat data sft    --source embedded --out data/sft        code questions and plain chat
    codechat data calls  --source embedded --out data/sft        toolbox conversations, problems, probes
    codechat data calls  --source my_rows.jsonl --preview 3      your own: OpenAI messages with tools, ShareGPT, Hermes,
                                                                 ToolACE, xLAM
    codechat data sft    --source OWNER/NAME --columns question=query,answer=response      a hub data set by name

Sources: `embedded` needs no network; `hub` streams public data sets; the columns of a file
decide how it is read. Each command prints how many rows it kept, skipped by a rule, and lost;
above --max-lost it writes nothing. All kinds except corpus may share a directory; each writes
DOMAIN.SPLIT.jsonl, and no file of another command."""

import sys

from codechat.core.errors import check_choice
from codechat.core.registry import PREPARATIONS

KINDS = {entry.id.removeprefix("data."): entry for entry in PREPARATIONS.values()}


def main(argv: list[str] | None = None) -> None:
    """`codechat data KIND [OPTIONS]`."""
    words = sys.argv[1:] if argv is None else argv
    kind = words[0] if words else "-h"
    if kind in ("-h", "--help"):
        _print_help()
        return
    check_choice("the kind of data is", kind, KINDS)
    KINDS[kind].run(words[1:])


def _print_help() -> None:
    """Print the usage, the kinds, and this module's text without its first line."""
    print("usage: codechat data KIND [OPTIONS]\n\nkinds (each with its own --help):")
    for name, entry in KINDS.items():
        print(f"  {name:<11}{entry.about}")
    _, _, about = (__doc__ or "").partition("\n\n")
    print(f"\n{about.rstrip()}")
