"""``python -m flashgen``: the command line."""

from flashgen.cli.main import main

if __name__ == "__main__":
    main()
