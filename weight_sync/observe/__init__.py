"""What a sync did and what it cost: spans, records, metrics, progress, table, report, wandb, timeline.

records, recorder   one sync measured and reduced (no third-party import)
observer            the pieces below put together: what a training loop holds
metrics             a record as a flat dict, also under the keys verl and miles users plot
progress, table     for the person at the terminal (rich)
report, timeline    for the files under outputs/<run>
wandb_sink          for wandb (imported only when a run is opened)
"""
