"""The command ``shardgate``, which is ``python -m shardgate`` too."""

import gc


def main() -> None:
    """Run the command; importing with the garbage collector off takes a third less time."""
    gc.disable()
    from shardgate.cli import main as run  # noqa: PLC0415 - what takes so long

    gc.freeze()
    gc.enable()
    run()


if __name__ == "__main__":
    main()
