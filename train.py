"""python train.py +weight_sync=p2p_tcp: the stand-alone job. See README.md; all keys are in conf/train.yaml."""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig

from weight_sync.config import check_arguments, job_from, register_schemas
from weight_sync.errors import WeightSyncError

register_schemas()


def refuse(error: WeightSyncError) -> None:
    """Say an error once, without a trace: the message is the diagnosis. Ends the process with exit code 1."""
    notes = [f"  {note}" for note in getattr(error, "__notes__", [])]
    print("\n".join([f"{type(error).__name__}: {error}", *notes]), file=sys.stderr)
    sys.exit(1)


@hydra.main(version_base="1.3", config_path="pkg://weight_sync_conf", config_name="train")
def main(cfg: DictConfig) -> None:
    try:
        job = job_from(cfg)
        # Only now: this imports what talks to Ray and to engines.
        if job.trainer.kind == "miles":
            from weight_sync_integrations.miles.launch import run as launch

            sys.exit(launch(job))
        from weight_sync_integrations.job import run

        version = run(job)
    except WeightSyncError as error:
        refuse(error)
    else:
        print(f"committed version {version}")


if __name__ == "__main__":
    try:
        check_arguments(sys.argv[1:])
    except WeightSyncError as wrong:
        refuse(wrong)
    main()
