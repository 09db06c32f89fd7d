"""Reports of finished and unfinished runs: what their folders hold, as one HTML page, figures and tables."""
