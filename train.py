"""python train.py +weight_sync=p2p_tcp: the stand-alone job. See README.md; all keys are in conf/train.yaml."""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig

from weight_sync.config import job_from, register_schemas
from weight_sync.errors import WeightSyncError

register_schemas()


@hydra.main(version_base="1.3", config_path="pkg://weight_sync_conf", config_name="train")
def main(cfg: DictConfig) -> None:
    from weight_sync_integrations.job import run

    try:
        version = run(job_from(cfg))
    except WeightSyncError as error:  # said once, without a trace: the message is the diagnosis
        notes = [f"  {note}" for note in getattr(error, "__notes__", [])]
        print("\n".join([f"{type(error).__name__}: {error}", *notes]), file=sys.stderr)
        sys.exit(1)
    print(f"committed version {version}")


if __name__ == "__main__":
    main()
