#!/bin/sh
# A batch job whose idle steps are offloaded from the GPU. The controller runs on
# the node (config/systemd/affinode-controller.service), jobs.users has the users in it.
#SBATCH --job-name=notebook
#SBATCH --gres=gpu:1
# VRAM is offloaded to the memory of the job: request the VRAM that it uses, 1 GiB for each CUDA
# process, and what the program itself needs.
#SBATCH --mem=64G

# With --or-unmanaged a node without a controller runs the step without Affinode.
exec srun affinode run --or-unmanaged --name "slurm-$SLURM_JOB_ID" \
    --annotation idle-timeout=10m -- python3 serve.py
