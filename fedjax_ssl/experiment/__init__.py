"""From a config to results on disk: build, run, checkpoint, log."""
