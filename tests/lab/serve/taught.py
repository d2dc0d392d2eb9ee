"""A tiny model that knows some conversations by heart, and what they say."""

from pathlib import Path

import torch

from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.text import chat, tokenizer, tool_calls, tool_lists
from codechat.text.tool_functions import read_tools
from codechat_lab.serve import conversations
from codechat_lab.tasks.toolbox.catalogue import TOOLS, respond

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "my_tools.py"
TOK = tokenizer.load("gpt2:512")
STEPS = 300
SQUARE = TOOLS["square"].schema
TOOL = {"type": "function", "function": SQUARE}
REQUEST, ANSWER, WORDS = (
    "What is 12 squared?",
    "12 squared is 144.",
    "Count the words in: to be or not",
)
CODE = "def f(x):\n    return x < 1 or x > 2  # <| end 日本 🎉"


def call(name: str, **arguments: object) -> str:
    return tool_calls.format_call(name, arguments)


CALL = call("square", x=12)


def exchange(user: str, *turns: str) -> list[dict[str, str]]:
    """A request, then turns of the assistant and of functions in alternation."""
    roles = ["user", *["assistant", "function"] * len(turns)]
    return [
        {"role": role, "content": text} for role, text in zip(roles, [user, *turns], strict=False)
    ]


def lessons() -> list[list[dict[str, str]]]:
    own = list(read_tools([str(EXAMPLE)]).schemas.values())
    systems = (
        conversations.NEUTRAL,
        tool_lists.tools_prompt([SQUARE], "compact"),
        tool_lists.tools_prompt(own, "compact"),
    )
    helpful, square, mine = ({"role": "system", "content": text} for text in systems)
    heavy = (
        '{"error": "ValueError: a parcel of 40 kg cannot be sent; '
        'it must weigh more than 0 and at most 30 kg"}'
    )
    return [
        exchange("code", CODE),
        [helpful, *exchange("code", CODE)],
        [helpful, *exchange("hello", "Hello."), *exchange("code", CODE)],
        [square, *exchange(REQUEST, CALL, respond("square", {"x": 12}), ANSWER)],
        [
            mine,
            *exchange(
                WORDS, call("count_words", text="to be or not"), '{"result": 4}', "Four words."
            ),
        ],
        [
            mine,
            *exchange(
                "Send 40 kg home",
                call("shipping_cost", weight_kg=40, zone="home"),
                heavy,
                "Too heavy.",
            ),
        ],
    ]


def new_model(seed: int) -> GPT:
    return GPT(
        GPTConfig(depth=2, n_embd=64, n_head=4, block_size=384, vocab_size=TOK.n_vocab), seed
    )


def learn(model: GPT) -> int:
    """Train on the lessons until the loss of the assistants' turns is below 0.01 nats; the
    steps it took. AssertionError where STEPS do not do."""
    rows = [chat.render(messages, TOK) for messages in lessons()]
    width = max(len(r.ids) for r in rows)
    ids = torch.tensor([r.ids + [TOK.eot_id] * (width - len(r.ids)) for r in rows])
    mask = torch.tensor([r.loss_mask + [0] * (width - len(r.ids)) for r in rows])
    targets = torch.where(mask[:, 1:] == 1, ids[:, 1:], -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(STEPS):
        loss = model.loss(ids[:, :-1], targets)
        if loss < 0.01:
            return step
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError(f"the lessons are not learned: loss {loss.item():.3f}")
