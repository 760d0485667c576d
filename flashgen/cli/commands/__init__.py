"""The subcommands, and the work of the larger ones."""
