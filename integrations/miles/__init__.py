"""miles (and slime, where its hooks are the same): our updater inside their training loops. See README.md in this folder."""
