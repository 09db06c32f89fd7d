"""A run in a folder: its config, log, checkpoints, lock and resume; and the queue of a sweep."""
