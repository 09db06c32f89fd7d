"""Configs: thin files, one per experiment; each opens with its command, its expected result and its run time."""
