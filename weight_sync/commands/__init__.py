"""The commands of python -m weight_sync that need no framework; each module's docstring is its --help."""
