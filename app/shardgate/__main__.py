"""The command ``shardgate``, which is ``python -m shardgate`` too."""

from shardgate.cli import main

if __name__ == "__main__":
    main()
