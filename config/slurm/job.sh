#!/bin/sh
# A batch job whose steps give their GPU back while they do not use it. The controller runs on
# the node (config/systemd/affinode-controller.service), jobs.users has the users in it.
#SBATCH --job-name=notebook
#SBATCH --gres=gpu:1
# VRAM moves into the memory of the job: ask for the VRAM that it uses plus 1 GiB more.
#SBATCH --mem=64G

# With --or-unmanaged a node without a controller runs the step as it always did.
exec srun affinode run --or-unmanaged --name "slurm-$SLURM_JOB_ID" \
    --annotation idle-timeout=10m -- python3 serve.py
