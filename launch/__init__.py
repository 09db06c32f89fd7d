"""Commands: python -m launch.run."""
