"""What the training loops share: settings, opening the policy and its optimizers, checks before the first step, when to evaluate and save, stop and
resume, metrics. Plain functions; the algorithms are in the loops at the top of the package.

Not for one loop's own idea: that stays in the loop.
"""

from codechat.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    modules=[
        "cadence",
        "continuation",
        "meters",
        "opening",
        "preflight",
        "sampling",
        "settings",
        "updates",
        "value_head",
    ],
    names={
        "opening": [
            "load_parent",
            "build_model",
            "build_policy",
            "build_optimizers",
            "lineage",
            "load_task",
            "open_eval_task",
            "read_probes",
            "compile_on_gpu",
            "open_rollouts",
        ],
        "sampling": ["RolloutSampler", "step_seed"],
        "cadence": ["evaluate_policy", "turn"],
        "continuation": ["open_run", "save", "running", "log_step", "check_before_save", "log_supervised", "stop"],
        "updates": [
            "set_rate",
            "backward",
            "apply_gradients",
            "compiled",
            "packs",
            "token_logprobs",
            "minibatches",
            "rows_in",
            "score",
            "totals",
        ],
        "meters": [
            "Meter",
            "Pace",
            "check_finite",
        ],
        "value_head": ["ValueHead", "explained_variance", "values_of", "whiten"],
    },
)
