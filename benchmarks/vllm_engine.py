"""vLLM in a process of its own, for peers.py: PYTHON -P vllm_engine.py FOLDER DTYPE TOKENS ROWS.

FOLDER has the model, a row at most TOKENS, a request at most ROWS. Each line of input is a request;
each line of output {wall_s, cpu_s, ids}: the seconds that its tokens took, and they.
"""

import json
import os
import sys
import time

# vLLM and what it calls write there too
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def main() -> None:
    import vllm

    folder, dtype, tokens, rows = sys.argv[1:]
    engine = vllm.LLM(
        model=folder,
        dtype=dtype,
        max_model_len=int(tokens),
        max_num_seqs=int(rows),
        max_num_batched_tokens=16384,  # on a CPU vLLM ends when it splits a seeded prompt
        enable_prefix_caching=False,  # each turn has the same prompts
        generation_config="vllm",
    )
    for line in sys.stdin:
        request = json.loads(line)
        sampling = vllm.SamplingParams(
            temperature=request["temperature"],
            top_k=request["top_k"],
            max_tokens=request["tokens"],
            ignore_eos=True,
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        began = time.perf_counter()
        began_cpu = time.process_time()
        found = engine.generate(prompts, sampling, use_tqdm=False)
        wall_s = time.perf_counter() - began
        cpu_s = time.process_time() - began_cpu
        ids = [list(row.outputs[0].token_ids) for row in found]
        print(json.dumps(dict(wall_s=wall_s, cpu_s=cpu_s, ids=ids)), file=answers, flush=True)


if __name__ == "__main__":
    main()
