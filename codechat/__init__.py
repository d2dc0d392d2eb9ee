"""CodeChat: a laboratory for training a small code-and-tool-calling language model from scratch.

What notebooks use is here by name (`from codechat import GPT, chat, tokenizer, generate, losses, rollout`) and imported when it is asked for;
everything lies in a room of its own (`codechat.models`, `codechat.rl`, ...).
"""

from codechat.core.lazy import attach

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = attach(
    __name__,
    modules=[
        "core",
        "distributed",
        "runs",
        "text",
        "models",
        "data",
        "sandbox",
        "tasks",
        "rl",
        "evaluation",
        "inference",
        "launch",
        "reports",
        "labs",
        "bench",
        "pretrain",
        "sft",
        "reinforce",
        "grpo",
        "ppo",
        "expert_iteration",
        "preference",
    ],
    names={
        "text": ["chat", "token_view", "tokenizer"],
        "reports": ["articles", "comparisons", "frozen_rows", "plots", "run_frames", "style", "token_attribution"],
        "core": [
            "CheckpointError",
            "ConfigError",
            "DataError",
            "MissingFile",
            "RunError",
            "UserError",
            "config",
            "errors",
        ],
        "models": ["GPT", "GPTConfig", "PRESETS", "generate", "gpt", "lora", "optim"],
        "data": ["conversations", "corpus", "glaive", "sources", "synthetic"],
        "distributed": ["dist", "gpu_specs", "hardware"],
        "evaluation": ["behaviour_probes", "contamination", "diagnose", "evaluate", "intervals", "results"],
        "rl": ["advantages", "episodes", "losses", "per_token_rewards", "preference_losses", "rollout"],
        "labs": ["chars", "defects", "exact_gradients", "scaling_law"],
        "runs": ["Run", "checkpoint", "metrics", "paths", "run"],
        "launch": ["launcher", "planner"],
    },
)
