#!/bin/bash
#SBATCH --job-name={{job}}
#SBATCH --nodes={{nodes}}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={{nproc}}
#SBATCH --time=24:00:00
#SBATCH --output={{path}}/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@{{save_s}}
# options of sbatch come first: sbatch --time=36:00:00 --partition=gpu FILE
set -eu
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 sh {{launch}} --nnodes "$SLURM_NNODES" \
    --rdzv-backend c10d --rdzv-endpoint "$head:{{port}}" --rdzv-id "$SLURM_JOB_ID"
