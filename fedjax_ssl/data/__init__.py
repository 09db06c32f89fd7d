"""Data: sources, splits, index tables, batches and augmentation."""
