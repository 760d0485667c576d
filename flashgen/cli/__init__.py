"""The ``flashgen`` command. stdout is data, stderr is talk; exit codes are in ``flashgen.cli.exits``."""
