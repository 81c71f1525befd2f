"""Deltas: only the elements that changed since a committed version travel. Settings, regions of a snapshot, the wire format.

Pure numpy: knows no session and no transport. Who compares, sends and applies: weight_sync/session/delta*.py; docs/delta.md.
"""
