"""The simulator: cohorts, their execution on devices, aggregation, and the round that joins them."""
